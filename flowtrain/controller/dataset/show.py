"""Single samples as the model gets them: text, the tokens that bear loss, images as decoded; no Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.images import ImageViewer, ShownImage
from flowtrain.data.conversation import IGNORE_LABEL
from flowtrain.data.rejections import rejected
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.samples import Rejection, SampleRef

SHOW_SCHEMA = 1
MAX_STORED = 100_000
"""Characters that are kept of a row that is no sample."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow each other and are treated alike."""

    text: str
    """Decoded tokens; of an image one image token only."""
    num_tokens: int
    bears_loss: bool
    is_image: bool


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample and what becomes of it."""

    source: str
    row: int
    file: str
    file_row: int
    """The row's number in the file, from 0."""
    block: int
    row_in_block: int
    id: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    """(role, text) as in the data; empty if the row is no sample."""
    stored: str | None = None
    """What a row that is no sample holds, without the images' bytes; its first ``MAX_STORED`` characters."""
    reason: str | None = None
    """Why it is quarantined; None if it is trained on."""
    detail: str | None = None
    image: int | None = None
    """The number of the image at fault, from 1; None if it is no single one."""
    segments: tuple[Segment, ...] = ()
    """The whole sequence; empty if it is quarantined."""
    num_tokens: int | None = None
    num_vision_tokens: int | None = None
    num_target_tokens: int | None = None
    num_cut: int | None = None
    """Tokens cut from the end by ``data.oversized: truncate_text``."""
    images: tuple[ShownImage, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        turns = [{"role": role, "text": text} for role, text in self.turns]
        return {**asdict(self), "turns": turns, "images": [image.as_record() for image in self.images]}


def show_rows(
    config: RunConfig,
    rows: Sequence[int],
    source: str | None = None,
    evaluation: bool = False,
    save_images: Path | None = None,
) -> list[ShownSample]:
    """Look at rows of one source.

    source: its name, or its number from 0; None: the only one.
    evaluation: take the rows of a held-out set instead, which ``source`` names then.
    save_images: a directory for each image as decoded and as the tower gets it.

    Raises ConfigError for a row or a source that is not there; DataError, SourceReadError if it cannot be read.
    """
    viewer = _Viewer(config, save_images)
    sources = SourceSet.from_config(config.data)
    names, num_train = sources.names, len(sources.train)
    if evaluation:
        chosen = num_train + _find_source(list(config.data.eval_sets), source, "data.eval", "held-out sets")
    else:
        chosen = _find_source(names[:num_train], source, "data.sources", "sources")
    index = sources.all[chosen].index
    outside = [row for row in rows if not 0 <= row < index.num_rows]
    if outside:
        raise ConfigError(f"--row {outside[0]}: source {names[chosen]} has rows 0 to {index.num_rows - 1}")
    shown = []
    for row in rows:
        block = index.block_of(row)
        file, file_row = index.place_of(row)
        place = ShownSample(
            source=names[chosen],
            row=row,
            file=file,
            file_row=file_row,
            block=block,
            row_in_block=row - int(index.first_rows[block]),
        )
        shown.append(viewer.show(place, sources, SampleRef(row, chosen, row, 0)))
    return shown


def _find_source(names: Sequence[str], asked: str | None, key: str, what: str) -> int:
    if asked is None:
        if len(names) == 1:
            return 0
        raise ConfigError(f"{key} has {len(names)} {what}; give one with --source: {', '.join(names)}")
    found = [index for index, name in enumerate(names) if name == asked]
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise ConfigError(f"--source {asked}: {len(found)} {what} have this name; give a number: {numbers}")
    if not found and asked.isdecimal() and int(asked) < len(names):
        return int(asked)
    if not found:
        raise ConfigError(f"--source {asked}: there is no such source in {key}, but {', '.join(names)}")
    return found[0]


class _Viewer:
    def __init__(self, config: RunConfig, save_images: Path | None) -> None:
        self._family = family_from_config(config)
        self._sizer = Sizer(self._family, self._family.tokenizer, config.data)
        self._images = ImageViewer(self._family, config.data, save_images)

    def show(self, place: ShownSample, sources: SourceSet, ref: SampleRef) -> ShownSample:
        """Fill in what becomes of the row at a place."""
        record = sources.record(ref)
        try:
            raw = record.sample()
        except BaseException as error:
            stored = record.stored_text()[:MAX_STORED]
            return replace(_quarantined(place, rejected(ref, error)), stored=stored)
        stem = f"{re.sub('[^A-Za-z0-9-]+', '_', place.source)[-60:]}-row-{ref.row}"
        images = self._images.look(ref, raw.images, stem)
        turns = tuple([(turn.role, turn.text) for turn in raw.turns])
        shown = replace(place, id=raw.id, turns=turns, images=tuple(images))
        loaded = self._sizer.load(ref, raw)
        result = loaded if isinstance(loaded, Rejection) else self._sizer.size(ref, loaded.measured)
        if isinstance(result, SizedResult):  # an encoder finds the rest, after the sample was planned
            result = next((image.rejection for image in images if image.rejection is not None), result)
        if isinstance(result, Rejection):
            return _quarantined(shown, result)
        sample = result.sample
        return replace(
            shown,
            segments=tuple(self._segments(result.text, [image.num_tokens or 0 for image in images])),
            num_tokens=sample.num_tokens,
            num_vision_tokens=sample.num_vision_tokens,
            num_target_tokens=sample.num_target_tokens,
            num_cut=result.num_cut,
        )

    def _segments(self, text: npt.NDArray[np.int32], image_tokens: Sequence[int]) -> Iterator[Segment]:
        """Cut ids and labels ``[2, num_tokens]`` into images and runs of text, and decode each."""
        ids, bears_loss = text[0], text[1] != IGNORE_LABEL
        is_image = ids == self._family.image_token_id
        image_ends = np.cumsum(image_tokens)
        # Every token gets the number of its image, or minus one or two.
        kind = np.where(bears_loss, -1, -2)
        kind[is_image] = np.searchsorted(image_ends, np.arange(is_image.sum()), side="right")
        starts = [0, *(np.flatnonzero(kind[1:] != kind[:-1]) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            shown = ids[start : start + 1] if is_image[start] else ids[start:end]
            decoded = self._family.tokenizer.decode(shown.tolist(), clean_up_tokenization_spaces=False)
            yield Segment(str(decoded), end - start, bool(bears_loss[start]), bool(is_image[start]))


def _quarantined(shown: ShownSample, rejection: Rejection) -> ShownSample:
    return replace(shown, reason=rejection.reason.value, detail=rejection.detail, image=rejection.image)
