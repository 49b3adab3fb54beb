"""``flowtrain data show``: prints samples as the model gets them; nothing in a text can steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flowtrain import api
from flowtrain.cli.plain_text import LOSS_CLOSE, LOSS_OPEN, one_line, plain
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.controller.dataset.images import ShownImage
from flowtrain.controller.dataset.show import SHOW_SCHEMA, Segment, ShownSample

MAX_TURN = 2000
"""Characters that are shown of a turn as it is in the data; the text below has them all."""
MAX_STORED_LINES, MAX_STORED_LINE = 40, 400
"""Lines that are shown of a row that is no sample, and characters of each."""


def show(
    config: Path,
    overrides: Sequence[str],
    rows: Sequence[int],
    source: str | None,
    evaluation: bool,
    save_images: Path | None,
    as_json: bool,
) -> None:
    """Show samples as ``api.data_show`` returns them."""
    samples = api.data_show(config, overrides, rows=rows, source=source, evaluation=evaluation, save_images=save_images)
    if as_json:
        print(json.dumps({"schema": SHOW_SCHEMA, "samples": [sample.as_record() for sample in samples]}))
        return
    console = Console(highlight=False)
    in_colour = console.is_terminal and console.color_system is not None and not console.no_color
    for number, sample in enumerate(samples):
        if number:
            console.print()
        _show(console, sample, in_colour)


def _show(console: Console, sample: ShownSample, in_colour: bool) -> None:
    encoding = console.encoding
    console.print(facts_table([(name, plain(text, encoding)) for name, text in _facts(sample)]))
    for number, (role, text) in enumerate(sample.turns, start=1):
        console.print()
        console.print(Text(f"turn {number}, {role}", "bold"))
        left = f" ... {len(text) - MAX_TURN:,} more characters" if len(text) > MAX_TURN else ""
        console.print(Text(plain(text[:MAX_TURN], encoding) + left), soft_wrap=True)
    if sample.stored:
        console.print()
        console.print(Text("as it is stored", "bold"))
        console.print(Text(_stored(sample.stored, encoding)), soft_wrap=True)
    if not sample.segments:
        return
    console.print()
    marks = "coloured" if in_colour else f"in {LOSS_OPEN}{LOSS_CLOSE}"
    console.print(Text(f"as the model gets it; tokens that bear loss are {marks}", "bold"))
    console.print(_rendered(sample.segments, in_colour, encoding), soft_wrap=True)


def _facts(sample: ShownSample) -> Iterator[tuple[str, str]]:
    yield (
        "source",
        f"{sample.source} row {sample.row}" + ("" if sample.id is None else f", id {one_line(sample.id, 200)}"),
    )
    yield "file", f"{sample.file} row {sample.file_row}; block {sample.block}, its row {sample.row_in_block}"
    if sample.reason is not None:
        yield "quarantined", f"{sample.reason}: {sample.detail}"
    else:
        of_which = f"{sample.num_vision_tokens:,} of images, {sample.num_target_tokens:,} with loss"
        cut = f"; {sample.num_cut:,} more are cut from its end" if sample.num_cut else ""
        yield "tokens", f"{sample.num_tokens:,}: {of_which}{cut}"
    for number, image in enumerate(sample.images, start=1):
        yield f"image {number}", _image(image, number == sample.image)
        for file in image.files:
            yield "", file


def _stored(text: str, encoding: str) -> str:
    lines = text.split("\n")
    shown = [one_line(line, MAX_STORED_LINE, encoding) for line in lines[:MAX_STORED_LINES]]
    return "\n".join([*shown, "..."] if len(lines) > MAX_STORED_LINES else shown)


def _image(image: ShownImage, is_at_fault: bool) -> str:
    """is_at_fault: the reason for the quarantine is this image; it has the path and the detail."""
    where = "" if image.path is None else f"; {image.path}"
    size = "" if image.nbytes is None else f"{nbytes_text(image.nbytes)}"
    if is_at_fault:
        return f"{size}, at fault".removeprefix(", ")
    if image.rejection is not None or image.size is None or image.tower_shape is None:
        fault = "" if image.rejection is None else image.rejection.detail
        return ", ".join(text for text in (size, fault) if text) + where
    width, height = image.size
    tower = "x".join(map(str, image.tower_shape))
    return (
        f"{image.format} {width}x{height} {image.mode}, {size}, {image.num_tokens} tokens, to the tower {tower}{where}"
    )


def _rendered(segments: Sequence[Segment], in_colour: bool, encoding: str) -> Text:
    """The sequence; an image's tokens are one word."""
    shown = Text()
    for segment in segments:
        text = plain(segment.text, encoding)
        if segment.is_image:
            shown.append(f"{text}*{segment.num_tokens}", "cyan")
        elif not segment.bears_loss:
            shown.append(text)
        elif in_colour:
            shown.append(text, "bold green")
        else:
            shown.append(f"{LOSS_OPEN}{text}{LOSS_CLOSE}")
    return shown
