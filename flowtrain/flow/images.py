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
        is_kept = False
        if self._keeps_batches:
            for part in position.parts:
                batch = part.batch
                if batch is not None:
                    is_kept = not position.rejected
                    if not batch.num_unread:
                        self._batch_over(batch)
        if not is_kept:
            self._drop(position)

    def _batch_over(self, batch: BatchRecord) -> None:
        """Free the images of a batch that is read, except those that a batch of another encoder still needs."""
        for part in batch.parts.values():
            position = part.position
            for other in position.parts:
                if other.batch is not None and other.batch.num_unread:
                    break
            else:
                self._drop(position)

    def _drop(self, position: PositionRecord) -> None:
        """Free images that are no longer needed, or have the leases that refer to them keep them."""
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


def _count_unfed(position: PositionRecord, change: int) -> None:
    """Count in a position's encode batches that its images were lost (1), or are there again or not needed (-1)."""
    for part in position.parts:
        if part.batch is not None:
            part.batch.num_unfed += change
