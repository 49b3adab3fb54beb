"""The encoded images of positions: which encode batches wait for them, and when their bytes are free."""

from __future__ import annotations

from flowtrain.flow.holdings import Holdings
from flowtrain.flow.leases import Leases
from flowtrain.flow.records import READY, RELEASED, BatchRecord, PartRecord, PositionRecord
from flowtrain.types.memory import Extent


class Images:
    """Keeps images until no encoder needs them. A rejected position's images are needed no more.

    Images that a lease refers to stay until its owner has reported, or no longer holds it.

    holdings: READY parts.
    leases: PENDING and LEASED parts.
    keeps_batches: images stay until every position of their encode batches was read, so that a lost batch can be
        encoded again as a whole and gives the same features to the bit. Otherwise they stay until their own position
        was read.
    """

    def __init__(self, holdings: Holdings, leases: Leases, keeps_batches: bool) -> None:
        self._holdings = holdings
        self._leases = leases
        self._keeps_batches = keeps_batches
        leases.on_unleased = self._free_held

    def put(self, images: PartRecord, owner: int, extents: tuple[Extent, ...]) -> None:
        """Take in images that a feeder has put. Raises PoolError for a wrong size or segment."""
        self._holdings.put(images, owner, extents, self._holdings.tier_of(images, owner, extents))

    def put_again(self, images: PartRecord, owner: int, extents: tuple[Extent, ...]) -> None:
        """Take in images that were lost. Raises as ``put``."""
        tier = self._holdings.tier_of(images, owner, extents)
        self._leases.leave(images)
        self._holdings.put(images, owner, extents, tier)
        _count_unfed(images.position, -1)

    def lose(self, images: PartRecord) -> None:
        """Have images that were READY produced again, unless only a lease has kept them."""
        if images.position.is_held:
            images.state = RELEASED
            images.extents = ()
            return
        self._leases.make_pending(images)
        _count_unfed(images.position, 1)

    def position_over(self, position: PositionRecord) -> None:
        """Free the images that are no longer needed, now that all parts of a position are released."""
        if not self._keeps_batches or position.rejected or not _is_batched(position):
            self._drop(position)
        if not self._keeps_batches:
            return
        for part in position.parts:
            batch = part.batch
            if batch is not None and not batch.num_unread:
                for other in batch.parts.values():
                    self._drop_if_over(other.position)

    def _drop_if_over(self, position: PositionRecord) -> None:
        """Free images whose batches are all read; each encoder has batches of its own."""
        for part in position.parts:
            if part.batch is not None and part.batch.num_unread:
                return
        self._drop(position)

    def _drop(self, position: PositionRecord) -> None:
        images = position.images
        if images is None or images.state is RELEASED or position.is_held:
            return
        if images.state is READY:
            for part in position.parts:
                if part.batch is not None and part.batch.num_leases:
                    part.batch.held.append(position)
                    position.is_held = True
            if position.is_held:
                return
            self._holdings.release(images)
        else:
            self._leases.leave(images)
            _count_unfed(position, -1)
        images.state = RELEASED
        images.extents = ()

    def _free_held(self, batch: BatchRecord) -> None:
        """Free the images that only leases of this batch have kept; none is left of them."""
        held, batch.held = batch.held, []
        for position in held:
            position.is_held = False
            self._drop(position)  # or a lease for another encoder keeps them


def _is_batched(position: PositionRecord) -> bool:
    return any(part.batch is not None for part in position.parts)


def _count_unfed(position: PositionRecord, change: int) -> None:
    """Count in a position's encode batches that its images were lost (1), or are there again or not needed (-1)."""
    for part in position.parts:
        if part.batch is not None:
            part.batch.num_unfed += change
