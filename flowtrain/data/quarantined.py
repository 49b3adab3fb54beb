"""Reads the images of quarantined rows again, for a report; whatever cannot be read has no image."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flowtrain.config.data import SourceConfig
from flowtrain.data.sources.bad_sample import BadSample
from flowtrain.data.sources.base import Record
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.data.sources.storage import is_remote
from flowtrain.errors import FlowTrainError

logger = logging.getLogger(__name__)

MAX_IMAGE_NBYTES = 32 << 20
MAX_BLOCK_NBYTES = 256 << 20
"""A row whose block is larger has no image: the block is read whole."""
BUDGET_S = 10.0
"""After it no further file is opened."""
_STORED = ("format", "image_root", "columns")


class QuarantinedImages:
    """From lines of ``quarantine.jsonl`` to encoded images, by the run's configuration; only local files are read."""

    def __init__(self) -> None:
        self._deadline_s = time.monotonic() + BUDGET_S
        self._block: tuple[object, list[Record]] | None = None

    def image_of(self, config: Mapping[str, Any], line: Mapping[str, Any]) -> bytes | None:
        """Return the image at fault, or the row's first one; None if it cannot be read or would take too long.

        config: plain values, of any version.
        """
        file, row, number = line.get("file"), line.get("file_row"), line.get("image")
        if not isinstance(file, str) or not isinstance(row, int) or is_remote(file) or not os.path.isfile(file):
            return None
        try:
            record = self._record(config, str(line.get("source")), file, row)
            if record is None:
                return None
            images = record.sample().images
            wanted = number - 1 if isinstance(number, int) and 1 <= number <= len(images) else 0
            return bytes(images[wanted].read(MAX_IMAGE_NBYTES)) if images else None
        except (FlowTrainError, BadSample, OSError, ValueError, LookupError, MemoryError) as error:
            logger.info("no picture of row %d of %s: %s", row, file, error)
            return None

    def _record(self, config: Mapping[str, Any], source: str, file: str, row: int) -> Record | None:
        stored = next((each for name, each in _sources(config) if name == source), {})
        given = {key: stored[key] for key in _STORED if stored.get(key) is not None}
        alone = SourceConfig.model_validate({**given, "path": file})
        if time.monotonic() > self._deadline_s:
            return None
        index = index_source(alone)  # of the one file
        if not 0 <= row < index.num_rows:
            return None
        block = index.block_of(row)
        if max(int(index.block_nbytes[block]), int(index.image_nbytes[block])) > MAX_BLOCK_NBYTES:
            return None
        key = (alone, block)
        if self._block is None or self._block[0] != key:
            self._block = None  # frees the one before
            self._block = key, list(open_source(alone, index).read_block(block))
        return self._block[1][row - int(index.first_rows[block])]


def _sources(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sources of a configuration by the names that the quarantine gives them."""
    data = config.get("data")
    if not isinstance(data, Mapping):
        return
    sources = data.get("sources")
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, Mapping):
            yield str(source.get("name") or source.get("path")), source
    held_out = data.get("eval")
    if isinstance(held_out, Mapping):
        yield "eval", held_out
        yield from ((f"eval/{name}", each) for name, each in held_out.items() if isinstance(each, Mapping))
