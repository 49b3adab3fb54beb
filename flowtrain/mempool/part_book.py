"""Where the parts lie that were made: READY ones in their owners' segments, RELEASED ones that wait to be freed.

The directory's half that looks at memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from flowtrain.errors import PoolError
from flowtrain.mempool.directory_records import BatchRecord, PartRecord, PartState
from flowtrain.mempool.eviction import farthest_parts
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.lease_book import LeaseBook
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease


class PartBook:
    """READY and RELEASED parts by owner; what has to be made again it hands to the lease book.

    aligned_nbytes gives what a run of bytes takes in a segment.
    """

    def __init__(self, space: AddressSpace, leases: LeaseBook, aligned_nbytes: Callable[[int], int]) -> None:
        self._space = space
        self._dram_base = space.base(Tier.DRAM)
        self._segment_nbytes = space.segment_nbytes
        self._leases = leases
        self._aligned_nbytes = aligned_nbytes
        self._ready_of: defaultdict[int, set[PartRecord]] = defaultdict(set)
        self._released_of: defaultdict[int, list[Extent]] = defaultdict(list)
        self._released_nbytes: defaultdict[int, int] = defaultdict(int)
        self._ready_nbytes = dict.fromkeys(Tier, 0)
        self.num_produced = 0
        """Positions whose parts have all been READY, each counted once."""

    def make_ready(self, part: PartRecord, owner: int, extents: tuple[Extent, ...]) -> Tier:
        """An owner has put a part; returns its tier.

        Raises PoolError for a wrong size and for extents outside the owner's segment.
        """
        tier = self._check(owner, part, extents)
        if part.state is PartState.LEASED:
            self._leases.leave(part)
        part.state = PartState.READY
        part.owner = owner
        part.extents = extents
        part.tier = tier
        self._ready_of[owner].add(part)
        self._ready_nbytes[tier] += part.nbytes
        position = part.position
        position.missing -= 1
        if position.missing:
            return tier
        if not position.produced:
            position.produced = True
            self.num_produced += 1
        if position.microbatch is not None:
            position.microbatch.one_less_missing()
        return tier

    def drop(self, part: PartRecord) -> None:
        """A part is not wanted any more, whatever its state."""
        if part.state is PartState.READY:
            self._ready_of[part.owner].discard(part)
            self._ready_nbytes[part.tier] -= part.nbytes
            self._release(part)
        elif part.state is not PartState.RELEASED:
            self._leases.leave(part)
        part.state = PartState.RELEASED
        part.extents = ()

    def lose(self, owner: int) -> None:
        """An owner died: what lay with it has to be made again."""
        self.take_released(owner)
        for part in self._ready_of.pop(owner, ()):
            self._unmake(part)

    def make_room(self, owner: int, blocked: BatchRecord, lacking_nbytes: int) -> bool:
        """Evict parts for a batch that needs so many bytes more in an owner's segment; whether anything was."""
        evicted = farthest_parts(self._ready_of.get(owner, ()), blocked, lacking_nbytes, self._aligned_nbytes)
        for part in evicted:
            self._make_again(part)
        return bool(evicted)

    def expire_leases(self) -> tuple[Lease, ...]:
        """Take back the leases that are too old, with what was made under them and no rank was told to read."""
        expired = self._leases.expire()
        for lease, batch in expired:
            for part in batch.parts.values():
                if part.state is PartState.READY and part.lease_id == lease.lease_id and not part.position.is_located:
                    self._make_again(part)
        return tuple([lease for lease, _ in expired])

    def _make_again(self, part: PartRecord) -> None:
        """Have the owner free a READY part, which is made again in its turn."""
        self._ready_of[part.owner].remove(part)
        self._release(part)
        self._unmake(part)

    def take_released(self, owner: int) -> tuple[Extent, ...]:
        """Hand an owner the extents that it may free, each once."""
        self._released_nbytes.pop(owner, None)
        return tuple(self._released_of.pop(owner, ()))

    def released_nbytes(self, owner: int) -> int:
        """Return what an owner's DRAM segment gains by freeing what ``take_released`` has for it."""
        return self._released_nbytes.get(owner, 0)

    def occupancy(self) -> dict[Tier, int]:
        """Return the bytes of READY parts in each tier."""
        return dict(self._ready_nbytes)

    def _release(self, part: PartRecord) -> None:
        self._released_of[part.owner] += part.extents
        if part.tier is Tier.DRAM:
            for extent in part.extents:
                self._released_nbytes[part.owner] += self._aligned_nbytes(extent.nbytes)

    def _unmake(self, part: PartRecord) -> None:
        self._ready_nbytes[part.tier] -= part.nbytes
        position = part.position
        position.missing += 1
        if position.missing == 1 and position.microbatch is not None:
            position.microbatch.one_more_missing()
        self._leases.make_pending(part)

    def _check(self, owner: int, part: PartRecord, extents: tuple[Extent, ...]) -> Tier:
        """Check a reported part against its size and its owner's segment; returns its tier."""
        if len(extents) == 1:  # nearly all are one run of DRAM
            (extent,) = extents
            distance = extent.gva - self._dram_base - owner * self._segment_nbytes
            if 0 <= distance <= self._segment_nbytes - extent.nbytes and extent.nbytes == part.nbytes > 0:
                return Tier.DRAM
        nbytes, tier = 0, Tier.DRAM
        for extent in extents:
            nbytes += extent.nbytes
            place = self._space.place(extent)
            tier = place.tier
            if place.process_index != owner:
                raise PoolError(
                    f"process {owner} reports {part.name} of position {part.position.ref.position} at {extent.gva:#x}, "
                    f"which belongs to process {place.process_index}"
                )
        if nbytes != part.nbytes:
            raise PoolError(
                f"position {part.position.ref.position}: its {part.name} was sized as {part.nbytes} bytes, process "
                f"{owner} put {nbytes}; the model's processing does not do what its sizing says"
            )
        return tier
