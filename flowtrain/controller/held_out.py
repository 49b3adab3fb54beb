"""Held-out samples for people: their texts, and their pictures as files that any browser shows."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from flowtrain.config.data import DataConfig
from flowtrain.data.images import decode_image
from flowtrain.data.sources.base import IMAGE_PLACEHOLDER, RawSample, Turn
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.types.samples import SampleRef
from flowtrain.types.sources import SourceIndex

logger = logging.getLogger(__name__)

MAX_SIDE = 512
"""Pixels of the longer side of a picture that is shown."""
READ_LIMIT_S = 30.0
"""The longest that a run's events wait for the rows."""


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    """A sample up to its first answer, and that answer."""

    prompt: str
    """With ``<image>`` for each picture."""
    reference: str
    pictures: tuple[bytes, ...] = ()
    """PNG files of the prompt's pictures, in order."""


class HeldOutSamples:
    """The rows that a run's model answers, read in a thread of its own, so that slow storage holds nothing up.

    Rows that cannot be read are missing, with a line in the log for those that are asked for.

    indexes: of all sources. num_rows: of each held-out set, how many of its first rows are read.
    """

    def __init__(self, config: DataConfig, indexes: Sequence[SourceIndex], num_rows: Sequence[int]) -> None:
        self._config = config
        self._indexes = indexes
        self._num_rows = num_rows
        self._found: dict[tuple[int, int], HeldOutSample] = {}
        self._faults: dict[tuple[int, int], str] = {}
        self._is_read = threading.Event()
        self._limit_s = READ_LIMIT_S
        if any(num_rows):
            threading.Thread(target=self._read, name="held-out", daemon=True).start()
        else:
            self._is_read.set()

    def get(self, eval_set: int, row: int) -> HeldOutSample | None:
        """Return a row of a held-out set; None if it could not be read, or not yet."""
        if not self._is_read.wait(self._limit_s):
            self._limit_s = 0.0
        if (fault := self._faults.pop((eval_set, row), None)) is not None:
            logger.warning("%s", fault)
        return self._found.get((eval_set, row))

    def _read(self) -> None:
        try:
            sources = SourceSet.from_config(self._config, self._indexes)
            for eval_set, count in enumerate(self._num_rows):
                for row in range(count):
                    self._read_row(sources, eval_set, row)
        except Exception as error:
            logger.warning("held-out samples are shown without their texts and pictures: %s", error)
        finally:
            self._is_read.set()

    def _read_row(self, sources: SourceSet, eval_set: int, row: int) -> None:
        source = sources.eval_index(eval_set)
        try:
            raw = sources.read(SampleRef(row, source, row, 0))
            self._found[eval_set, row] = shown_sample(raw, self._config)
        except Exception as error:
            name = sources.names[source]
            self._faults[eval_set, row] = f"row {row} of {name} is shown without its texts and pictures: {error}"


def shown_sample(raw: RawSample, config: DataConfig) -> HeldOutSample:
    """Return a sample as people see it; raises BadSample, SourceReadError or OSError if it cannot be read."""
    asked = list(takewhile(lambda turn: turn.role != "assistant", raw.turns))
    answer = raw.turns[len(asked)] if len(asked) < len(raw.turns) else Turn("assistant", "")
    prompt = "\n".join(turn.text for turn in asked)
    images = raw.images[: prompt.count(IMAGE_PLACEHOLDER)]
    pictures = tuple([_png(image.read(config.max_image_nbytes), config.max_image_pixels) for image in images])
    return HeldOutSample(prompt, answer.text, pictures)


def _png(data: bytes | memoryview, max_pixels: int) -> bytes:
    image = decode_image(data, max_pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
