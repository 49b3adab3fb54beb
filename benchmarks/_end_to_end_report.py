"""The page and the picture of ``end_to_end.py``: docs/results/end_to_end.md and .svg."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import median

import matplotlib
from _end_to_end_auto import AUTO
from _end_to_end_contest import BLIND
from _end_to_end_figures import ABLATIONS, Rounds, is_ablation, paired, rates
from _end_to_end_peers import PEERS
from _end_to_end_store import Record, Setting
from _modes_data import ROOT
from _report import Figure, commit, machine

PAGE = ROOT / "docs" / "results" / "end_to_end.md"
PICTURE = PAGE.with_suffix(".svg")
GREY, OURS, THEIRS, BEST = "#7d7d7d", "#4f86c6", "#c98b3c", "#2f9e6e"
"""Readable on white and on black."""
NORMALISATION = (
    "All divide the sum of losses by the target tokens of the whole step, over all processes: FlowTrain by itself, HF "
    "Trainer and TRL since they pass `num_items_in_batch` to the model and count it over all processes, the loop "
    "after Ray Data by its own sum. So first losses agree, padded or packed."
)
CONDITIONS = (
    "Two pinned cores, real compute, float32, AdamW with clipping, the same samples in the same order from the same "
    "weights. Real tokens a second, after warm-up and before the last steps; padding does not count. In a round all "
    "ran one after another, each order rotated; later rounds may be of fewer. Each peer has the best of the settings "
    "that short trials found: one process with two threads or two with one, microbatches of one sample or as many as "
    "fit, and for both trainers samples in order or sorted by cost within a step (`train_sampling_strategy: "
    "batch_rebalance`). Ray Data encodes ahead through all samples, so there the whole run counts, from the first "
    "encoded sample on. Other machines on the same host slow this one down for seconds or minutes. So a probe watches"
    " its speed, and runs while it was more than 5 % slower than in the setting's other runs are repeated. Rounds "
    "still differ: compare by *`auto` over it*, the median ratio of the rounds that both have, and not by tokens/s "
    "where one has fewer rounds. *Starved* is the share of its time in which the backbone waits for data, *copied* "
    "what processes copy out of the pool and into it, *peak memory* that of all actors together."
)
HEAD = (
    "# End to end: all modes, ablations, `mode: auto`, and what else there is",
    "",
    CONDITIONS,
    "",
    NORMALISATION,
    "",
    f"[{PAGE.stem}]({PAGE.stem}) has the runs, trials and profiles. Each setting names its commit.",
    "",
    f"![Tokens a second of each over those of auto]({PICTURE.name})",
)


def write_report(
    found: dict[Setting, Rounds],
    figures: Sequence[Figure],
    origins: dict[Setting, str],
    arguments: Sequence[str],
    drawn: dict[Setting, Rounds],
    also: Sequence[str] = (),
) -> None:
    """Write the settings' sections into the page, where others stay as they are, and the picture of all ``drawn``."""
    draw(drawn)
    sections = _sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for setting, rounds in found.items():
        sections[f"{setting.model}, {setting.mix}"] = section(
            setting, rounds, figures, origins[setting], arguments, also
        )
    lines = list(HEAD)
    for title, body in sorted(sections.items()):
        lines += ["", f"## {title}", "", *body]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(text: str) -> dict[str, list[str]]:
    """Lines of a page's sections, by title."""
    parts = (each.partition("\n") for each in text.split("\n## ")[1:])
    return {title: body.strip().splitlines() for title, _, body in parts}


def section(
    setting: Setting,
    rounds: Rounds,
    figures: Sequence[Figure],
    origin: str,
    arguments: Sequence[str],
    also: Sequence[str] = (),
) -> list[str]:
    """Lines of one setting's section, without its title."""
    seen = machine()
    host = f"{seen['cpu']}, {seen['cores']} cores, {seen['memory_gib']} GiB, no accelerator"
    command = shlex.join([".venv/bin/python", "benchmarks/end_to_end.py", *_without_places(arguments)])
    lines = ["```", command, "```", ""]
    trees = f", and runs of flowtrain/ at the trees {', '.join(also)}" if also else ""
    lines += [f"Commit {commit()}{trees}. Machine: {host}, Python {seen['python']}, torch {seen['torch']}.", ""]
    lines += [f"Lengths: {origin}.", "", *_rates_table(rounds), "", *_targets_table(setting, figures)]
    if predicted := [each for each in figures if each.name.startswith(f"{setting.label}.planned.")]:
        lines += ["", *_plan_table(setting, rounds, predicted)]
    return lines


def _without_places(arguments: Sequence[str]) -> list[str]:
    """The command's arguments, without where directories are on this machine."""
    return [
        "DIRECTORY" if before in ("--traces", "--models-dir", "--directory") else each
        for before, each in zip(["", *arguments], arguments, strict=False)
    ]


def _rates_table(rounds: Rounds) -> list[str]:
    lines = [
        "| | tokens/s | lowest to highest | `auto` over it | starved | copied a step | peak memory | how |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    auto = rounds.get(AUTO, {})
    for name in sorted(rounds, key=lambda name: -median(paired(rounds, name, AUTO) or [0.0])):
        runs = rounds[name]
        ratios = [auto[number].tokens_per_s / run.tokens_per_s for number, run in runs.items() if number in auto]
        first = next(iter(runs.values()))
        spread = f"{min(rates(runs)):.0f} to {max(rates(runs)):.0f} in {len(runs)} rounds"
        if len(runs) == 1:
            spread = "one run"
        over = f"{median(ratios):.3f}" if ratios and name != AUTO else "-"
        details = [
            _middle(runs, "starved_share", "{:.3f}"),
            _middle(runs, "copied_nbytes", "{:.2f} MB", 1e-6),
            _middle(runs, "peak_nbytes", "{:.2f} GB", 1e-9),
        ]
        cells = [_title(name), f"{median(rates(runs)):.0f}", spread, over, *details, first.how]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _middle(runs: dict[int, Record], detail: str, form: str, factor: float = 1.0) -> str:
    """The median of a detail over the rounds, or a dash where contestants do not have it."""
    found = [run.details[detail] for run in runs.values() if detail in run.details]
    return form.format(factor * median(found)) if found else "-"


def _title(name: str) -> str:
    if name in PEERS:
        return PEERS[name].title
    if name == BLIND:
        return f"`{name}`, without images"
    if is_ablation(name):
        return f"`{name}`, an ablation" + (f" of `{ABLATIONS[name]}`" if name in ABLATIONS else "")
    return f"`{name}`"


def _targets_table(setting: Setting, figures: Sequence[Figure]) -> list[str]:
    lines = ["| | value | target | met | note |", "| --- | --- | --- | --- | --- |"]
    for each in figures:
        if each.target is not None and each.name.startswith(f"{setting.label}."):
            name, met = each.name.removeprefix(f"{setting.label}."), "yes" if each.met else "no"
            lines.append(f"| `{name}` | {each.value:.4g} | {each.target:g} | {met} | {each.note} |")
    return lines


def _plan_table(setting: Setting, rounds: Rounds, predicted: Sequence[Figure]) -> list[str]:
    lines = ["| mode, as planned | predicted samples/s | measured tokens/s | plan |", "| --- | --- | --- | --- |"]
    for each in predicted:
        mode = each.name.removeprefix(f"{setting.label}.planned.")
        name, _, how = each.note.partition(": ")
        measured = f"{median(rates(rounds[name])):.0f}, as `{name}`" if name in rounds else "-"
        lines.append(f"| `{mode}` | {each.value:.4g} | {measured} | {how} |")
    return lines


def draw(found: dict[Setting, Rounds]) -> None:
    """Draw the rates of each setting over ``auto``'s in the same round, as bars with the range of the rounds."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "flowtrain", "font.size": 8})
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    most = max(len(rounds) for rounds in found.values())
    size = (4.2 * columns, (0.6 + 0.19 * most) * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, (setting, rounds) in zip(axes.flat, found.items(), strict=False):
        shares = {name: ratios for name in rounds if (ratios := paired(rounds, name, AUTO))}
        names = sorted(shares, key=lambda name: median(shares[name]))
        middles = [median(shares[name]) for name in names]
        spread = [
            [middle - min(shares[name]) for name, middle in zip(names, middles, strict=True)],
            [max(shares[name]) - middle for name, middle in zip(names, middles, strict=True)],
        ]
        colours = [BEST if name == AUTO else THEIRS if name in PEERS else OURS for name in names]
        titles = [PEERS[name].title if name in PEERS else name for name in names]
        axis.barh(titles, middles, xerr=spread, color=colours, ecolor=GREY, error_kw={"linewidth": 0.8})
        axis.set_title(f"{setting.model}, {setting.mix}", color=GREY)
        axis.tick_params(colors=GREY)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    for axis in list(axes.flat)[len(found) :]:
        axis.set_visible(False)
    figure.supxlabel("tokens/s over those of auto in the same round", color=GREY, fontsize="medium")
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
