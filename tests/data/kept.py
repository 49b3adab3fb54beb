"""A shelf that keeps what a feed puts, and what came of a feed's share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from flowtrain.data.feed import Share
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import Buffer, RawSample
from flowtrain.types.memory import Extent
from flowtrain.types.samples import Rejection, SampleRef, SizedSample

Outcome = tuple[SizedSample, bytes, bytes] | Rejection
"""A sample with the bytes of its text and of its images, or why it was rejected."""


class KeepingShelf:
    """Numbers what is put; the number stands for its address."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.shared: Counter[int] = Counter()
        self._last = -1

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        """See ``Shelf``."""
        self._last += 1
        self.held[self._last] = b"".join(np.frombuffer(piece, np.uint8).tobytes() for piece in pieces)
        return (Extent(self._last, len(self.held[self._last])),)

    def free(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``."""
        for extent in extents:
            self._take(extent)

    def share(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``."""
        self.shared.update(extent.gva for extent in extents)

    def _take(self, extent: Extent) -> bytes:
        """Free an extent; returns its bytes."""
        if self.shared[extent.gva]:
            self.shared[extent.gva] -= 1
            return self.held[extent.gva]
        return self.held.pop(extent.gva)

    def outcomes(self, share: Share) -> dict[int, Outcome]:
        """Return what came of a share, by position; the share's bytes are freed."""
        images = {part.position: self._take(part.extents[0]) for part in share.images}
        found: dict[int, Outcome] = {rejection.ref.position: rejection for rejection in share.rejections}
        for sample, text in zip(share.sized, share.texts, strict=True):
            assert sample.position == text.position
            found[sample.position] = sample, self.held.pop(text.extents[0].gva), images.pop(sample.position, b"")
        assert not images
        return dict(sorted(found.items()))


def size(sizer: Sizer, ref: SampleRef, raw: RawSample) -> SizedResult | Rejection:
    """Read and size a sample at once."""
    loaded = sizer.load(ref, raw)
    return loaded if isinstance(loaded, Rejection) else sizer.size(ref, loaded.measured)
