"""The sections about data: what was trained on, what was rejected, what the model generated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowtrain.observability.report.blocks import Cell, cut, number_cell, table, text_cell
from flowtrain.observability.report.markup import element
from flowtrain.observability.report.pictures import Pictures
from flowtrain.observability.report.reading import as_count, as_list, as_number, as_text, dig
from flowtrain.observability.report.run_data import Record, RunData
from flowtrain.observability.report.units import MISSING, percent, scaled

MAX_REJECTED = 40
"""Rejected samples that the page shows one by one."""
MAX_SAMPLES = 24
"""Generated samples that the page shows, of all held-out sets."""
MAX_IMAGES = 4
"""Of one sample."""
MAX_EARLIER = 20
"""Earlier texts of one sample."""
MAX_LEDGER_NBYTES = 256 << 20

ImageOf = Callable[[Mapping[str, Any], Record], bytes | None]
"""From the configuration and a line of ``quarantine.jsonl`` to the encoded image at fault, or the first one."""


def sources_table(run: RunData) -> Markup | None:
    """Return how many samples of each source were trained on, from the ledger; None without one."""
    counts = _ledger_counts(run.files.ledger)
    if not counts:
        return None
    weights = {name: weight for name, weight in _weights(run.config)}
    total_weight = sum(weights.values())
    total = sum(consumed for consumed, _ in counts.values())
    rows = []
    for name, (consumed, rejected) in sorted(counts.items(), key=lambda item: -item[1][0]):
        weight = weights.get(name, math.nan)
        rows.append(
            [
                text_cell(name),
                number_cell(f"{consumed:,}"),
                number_cell(percent(consumed / total) if total else MISSING),
                number_cell(percent(weight / total_weight) if total_weight else MISSING),
                number_cell(f"{rejected:,}"),
            ]
        )
    headings = ("source", "samples trained", "share", "configured share", "rejected")
    return table("Samples by source", headings, rows)


def _weights(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for source in as_list(dig(config, "data", "sources")):
        weight = as_number(dig(source, "weight"))
        yield as_text(dig(source, "name") or dig(source, "path")), weight if math.isfinite(weight) else 1.0


def _ledger_counts(path: Path) -> dict[str, tuple[int, int]]:
    """Return (consumed, rejected) of each source; empty if the ledger is missing, damaged or very large."""
    parts = sorted(path.glob("part-*.parquet")) if path.is_dir() else []
    if not parts or sum(part.stat().st_size for part in parts) > MAX_LEDGER_NBYTES:
        return {}
    import pyarrow.parquet as pq  # slow to import, and most commands do not need it

    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for part in parts:
        try:
            rows = pq.read_table(part, columns=["source", "state"])
            found = rows.group_by(["source", "state"]).aggregate([([], "count_all")]).to_pylist()
        except (OSError, ValueError, KeyError):  # torn: pyarrow's ArrowInvalid is a ValueError
            continue
        for row in found:
            counts[as_text(row["source"])][row["state"] != "consumed"] += row["count_all"]
    return {name: (consumed, rejected) for name, (consumed, rejected) in counts.items()}


def ask_quarantined(run: RunData, pictures: Pictures, image_of: ImageOf | None, prefix: str) -> None:
    """Ask for the pictures of rejected samples. image_of: how to read an image; None: there are no pictures."""
    if image_of is None:
        return
    for index, record in enumerate(run.quarantine.first[:MAX_REJECTED]):
        data = image_of(run.config, record)
        if data:
            pictures.ask(f"{prefix}q{index}", data)


def quarantine_content(run: RunData, pictures: Pictures, prefix: str) -> list[Markup | None]:
    """Return rejected samples: how many by reason, and the first ones."""
    found = run.quarantine
    if not found.num_samples:
        return [element("p", "No sample was rejected.", class_="muted")]
    reasons = [
        [text_cell(reason), number_cell(f"{count:,}"), number_cell(percent(count / found.num_samples))]
        for reason, count in found.reasons.items()
    ]
    rows = [_rejected_row(record, pictures, f"{prefix}q{index}") for index, record in enumerate(found.first)]
    has_pictures = any(row[-1].content is not None for row in rows)
    headings = ["sample", "reason", "details", *(["picture"] if has_pictures else [])]
    shown = rows[:MAX_REJECTED]
    caption = f"The first {len(shown):,} of {found.num_samples:,}" if found.num_samples > len(shown) else "Each of them"
    return [
        table("Rejected samples by reason", ("reason", "samples", "share"), reasons),
        table(caption, headings, [row[: len(headings)] for row in shown]),
    ]


def _rejected_row(record: Record, pictures: Pictures, key: str) -> list[Cell]:
    source, row = as_text(record.get("source")), as_count(record.get("row"))
    place = f"{source}, row {row:,}" if row is not None else source
    if record.get("id") is not None:
        place = f"{place}, id {as_text(record.get('id'))}"
    parts = (as_text(record.get("detail")), as_text(record.get("path")))
    details = "; ".join(part for part in parts if part)
    picture = pictures.shown(key, f"Image of {cut(place, 80)}")
    return [text_cell(place), text_cell(as_text(record.get("reason"))), text_cell(details), Cell(picture)]


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model said about one held-out sample, evaluation by evaluation."""

    name: str
    """Of the held-out set."""
    row: int | None
    prompt: str
    reference: str
    texts: tuple[tuple[int, str], ...]
    """(step, text), in order of steps."""
    images: tuple[str, ...]
    """Paths from the run's directory."""


def generated_of(run: RunData) -> list[Generated]:
    """Return the generated samples of a run, the same sample of several evaluations together."""
    texts: dict[tuple[str, ...], dict[int, str]] = {}
    shown: dict[tuple[str, ...], Record] = {}
    for event in run.of_kind("evaluation"):
        step, name = as_count(event.get("step")) or 0, as_text(event.get("name"))
        for sample in as_list(event.get("generated")):
            if not isinstance(sample, Mapping):
                continue
            row = sample.get("row")
            key = (name, as_text(sample.get("source")), as_text(sample.get("prompt") if row is None else row))
            texts.setdefault(key, {})[step] = as_text(sample.get("text"))
            if key not in shown or as_list(sample.get("images")) or not shown[key].get("prompt"):
                shown[key] = sample  # the newest one that has pictures: a run may write them once
    return [
        Generated(
            name=key[0],
            row=as_count(shown[key].get("row")),
            prompt=as_text(shown[key].get("prompt")),
            reference=as_text(shown[key].get("reference")),
            texts=tuple(sorted(found.items())),
            images=tuple(map(as_text, as_list(shown[key].get("images")))),
        )
        for key, found in list(texts.items())[:MAX_SAMPLES]
    ]


def ask_generated(run: RunData, samples: Sequence[Generated], pictures: Pictures, prefix: str) -> None:
    """Ask for the pictures of generated samples; only files inside the run's directory are read."""
    root = run.files.root.resolve()
    for index, sample in enumerate(samples):
        for number, name in enumerate(sample.images[:MAX_IMAGES]):
            try:
                path = (root / name).resolve()
            except (OSError, ValueError, RuntimeError):  # no path at all, or links in a circle
                continue
            if path.is_relative_to(root):
                pictures.ask_file(f"{prefix}g{index}-{number}", path)


def generated_content(samples: Sequence[Generated], pictures: Pictures, prefix: str) -> Markup | None:
    """Return a card for each generated sample; None if there are none."""
    if not samples:
        return None
    cards = [_card(sample, pictures, f"{prefix}g{index}") for index, sample in enumerate(samples)]
    return element("div", cards, class_="samples")


def _card(sample: Generated, pictures: Pictures, key: str) -> Markup:
    title = cut(sample.name, 80) + (f", row {sample.row:,}" if sample.row is not None else "")
    shown = [
        pictures.shown(f"{key}-{number}", f"Image {number + 1} of {title}")
        for number in range(min(len(sample.images), MAX_IMAGES))
    ]
    step, text = sample.texts[-1]
    earlier = [
        [element("dt", f"after step {before:,}"), _answer(words)]
        for before, words in reversed(sample.texts[-1 - MAX_EARLIER : -1])
    ]
    return element(
        "article",
        element("h3", title),
        element("div", shown, class_="pictures") if any(shown) else None,
        element(
            "dl",
            element("dt", "Prompt"),
            element("dd", cut(sample.prompt), class_="text"),
            element("dt", "Answer in the data"),
            element("dd", cut(sample.reference), class_="text"),
            element("dt", f"Generated after step {step:,}"),
            _answer(text),
        ),
        element("details", element("summary", "Earlier"), element("dl", earlier)) if earlier else None,
        class_="sample",
    )


def _answer(text: str) -> Markup:
    """Return what a model said; an empty answer is named, since nothing would look like a fault of the page."""
    if not text.strip():
        return element("dd", "(empty)", class_="muted")
    return element("dd", cut(text), class_="text")


def transports_table(run: RunData) -> Markup | None:
    """Return how many bytes each transport carried; None if the run does not tell."""
    found = run.steps.read_nbytes
    total = sum(found.values())
    if not total:
        return None
    rows = [
        [text_cell(name), number_cell(scaled(nbytes, "nbytes")), number_cell(percent(nbytes / total))]
        for name, nbytes in sorted(found.items(), key=lambda item: -item[1])
    ]
    return table("Bytes read from the pool", ("transport", "bytes", "share"), rows)
