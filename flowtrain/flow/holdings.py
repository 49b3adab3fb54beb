"""Which READY parts lie in which owner's segment, and which extents an owner may free."""

from __future__ import annotations

from collections import defaultdict

from flowtrain.errors import PoolError
from flowtrain.flow.records import DRAM, READY, PartRecord
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, Tier


class Holdings:
    """The READY parts of each owner, and what it may free.

    space: the pool's address space, to check the reports of owners.
    alignment: of extents in the pool, in bytes.
    """

    def __init__(self, space: AddressSpace, alignment: int) -> None:
        self._space = space
        self._dram_base = space.base(Tier.DRAM)
        self._segment_nbytes = space.segment_nbytes
        self._alignment = alignment
        self._ready_of: defaultdict[int, set[PartRecord]] = defaultdict(set)
        self._released_of: defaultdict[int, list[Extent]] = defaultdict(list)
        self._released_nbytes: defaultdict[int, int] = defaultdict(int)
        self._hbm_nbytes_of: defaultdict[int, int] = defaultdict(int)

    def tier_of(self, part: PartRecord, owner: int, extents: tuple[Extent, ...]) -> Tier:
        """Return the tier in which an owner has put a part.

        Raises PoolError for a wrong size and for extents outside the owner's segment.
        """
        if len(extents) == 1:  # nearly every part is one run in its owner's DRAM
            extent = extents[0]
            nbytes, size = extent.nbytes, self._segment_nbytes
            distance = extent.gva - self._dram_base - owner * size
            if nbytes == part.nbytes > 0 and 0 <= distance <= size - nbytes:
                return DRAM
        return self._checked_tier(part, owner, extents)

    def put(self, part: PartRecord, owner: int, extents: tuple[Extent, ...], tier: Tier = DRAM) -> None:
        """Make a part READY where its owner has put it."""
        part.state = READY
        part.owner = owner
        part.extents = extents
        part.tier = tier
        self._ready_of[owner].add(part)
        if tier is not DRAM:
            self._hbm_nbytes_of[owner] += part.nbytes

    def release(self, part: PartRecord) -> None:
        """Let the owner of a READY part free its bytes."""
        owner, extents = part.owner, part.extents
        self._ready_of[owner].discard(part)
        self._released_of[owner] += extents
        if part.tier is not DRAM:
            self._hbm_nbytes_of[owner] -= part.nbytes
        elif len(extents) == 1:
            self._released_nbytes[owner] += part.aligned_nbytes
        else:
            alignment = self._alignment
            self._released_nbytes[owner] += sum(-(-extent.nbytes // alignment) * alignment for extent in extents)

    def ready_parts(self, owner: int) -> set[PartRecord]:
        """Return the READY parts of an owner."""
        return self._ready_of.get(owner, set())

    def lose(self, owner: int) -> set[PartRecord]:
        """Forget all that a lost owner has. Returns the parts that were READY."""
        self.take_released(owner)
        parts = self._ready_of.pop(owner, set())
        self._hbm_nbytes_of.pop(owner, None)
        return parts

    def take_over(self, earlier: Holdings) -> None:
        """Let the owners of an earlier flow free all that they have there."""
        for parts in list(earlier._ready_of.values()):
            for part in list(parts):
                earlier.release(part)
        self._released_of, self._released_nbytes = earlier._released_of, earlier._released_nbytes

    def hbm_nbytes_of(self, owner: int) -> int:
        """Return the bytes of an owner's READY parts in HBM."""
        return self._hbm_nbytes_of.get(owner, 0)

    @property
    def hbm_nbytes(self) -> int:
        """Bytes of READY parts in HBM, of all owners."""
        return sum(self._hbm_nbytes_of.values())

    def take_released(self, owner: int) -> tuple[Extent, ...]:
        """Return the extents that an owner may free, each once."""
        self._released_nbytes.pop(owner, None)
        return tuple(self._released_of.pop(owner, ()))

    def released_nbytes(self, owner: int) -> int:
        """Return the DRAM bytes that an owner gains when it frees what ``take_released`` has for it."""
        return self._released_nbytes.get(owner, 0)

    def _checked_tier(self, part: PartRecord, owner: int, extents: tuple[Extent, ...]) -> Tier:
        """Return the tier of a reported part. Raises PoolError for a wrong size or another's segment."""
        nbytes, tier = 0, DRAM
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
                f"{owner} put {nbytes}; the model's processing and its sizing disagree"
            )
        return tier
