"""The pool's global virtual address space: pure integer arithmetic (FlowTrain 3.2, figure 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flowtrain.errors import AddressError, ConfigError
from flowtrain.types.memory import Extent, Tier

HBM_BASE = 1 << 56
"""Default first address of the HBM region. Address 0 belongs to no process, so a zeroed address is never valid."""

DRAM_BASE = 1 << 60
"""Default first address of the DRAM region."""

ADDRESS_LIMIT = 1 << 64


class Place(NamedTuple):
    """Where an address lies: byte ``offset`` of the segment of process ``process_index`` in ``tier``."""

    tier: Tier
    process_index: int
    offset: int


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Two disjoint regions ``[B, B + N*C)``, one per tier; process i owns ``[B + i*C, B + (i+1)*C)`` of each.

    Raises ConfigError if the regions overlap or do not fit into 64 bits.
    """

    num_processes: int
    """N: processes that can ever take part in a run."""
    segment_nbytes: int
    """C: the most bytes that a process may give in a tier."""
    hbm_base: int = HBM_BASE
    """B of the HBM region."""
    dram_base: int = DRAM_BASE
    """B of the DRAM region."""

    def __post_init__(self) -> None:
        if self.num_processes < 1 or self.segment_nbytes < 1:
            raise ConfigError(
                f"pool.max_processes ({self.num_processes}) and pool.max_segment_nbytes ({self.segment_nbytes}) must "
                "be at least 1"
            )
        region = self.num_processes * self.segment_nbytes
        low, high = sorted((self.hbm_base, self.dram_base))
        if low <= 0 or low + region > high or high + region > ADDRESS_LIMIT:
            raise ConfigError(
                f"pool.max_processes ({self.num_processes}) x pool.max_segment_nbytes ({self.segment_nbytes}) = "
                f"{region} bytes a tier does not fit the 64-bit address space with regions at {self.hbm_base:#x} (hbm) "
                f"and {self.dram_base:#x} (dram); lower one of them"
            )

    def base(self, tier: Tier) -> int:
        """Return the first address of a tier's region."""
        return self.dram_base if tier is Tier.DRAM else self.hbm_base

    def gva(self, tier: Tier, process_index: int, offset: int) -> int:
        """Return the address of a byte of a process's segment. Raises AddressError if there is no such byte."""
        if not 0 <= process_index < self.num_processes:
            raise AddressError(f"process index {process_index} is outside the {self.num_processes} of the pool")
        if not 0 <= offset < self.segment_nbytes:
            raise AddressError(
                f"offset {offset} is outside the {tier} segment of process {process_index} "
                f"({self.segment_nbytes} bytes)"
            )
        return self.base(tier) + process_index * self.segment_nbytes + offset

    def translate(self, gva: int) -> Place:
        """Return where an address lies. Raises AddressError for an address outside both regions."""
        region = self.num_processes * self.segment_nbytes
        distance = gva - self.dram_base
        if 0 <= distance < region:
            return Place(Tier.DRAM, *divmod(distance, self.segment_nbytes))
        distance = gva - self.hbm_base
        if 0 <= distance < region:
            return Place(Tier.HBM, *divmod(distance, self.segment_nbytes))
        raise AddressError(
            f"address {gva:#x} is outside the pool: hbm is [{self.hbm_base:#x}, {self.hbm_base + region:#x}), "
            f"dram is [{self.dram_base:#x}, {self.dram_base + region:#x})"
        )

    def place(self, extent: Extent) -> Place:
        """Return where an extent starts. Raises AddressError if it is empty or ends after its segment."""
        place = self.translate(extent.gva)
        if extent.nbytes < 1 or place.offset + extent.nbytes > self.segment_nbytes:
            raise AddressError(
                f"extent of {extent.nbytes} bytes at {extent.gva:#x} does not lie in one segment: it starts at offset "
                f"{place.offset} of the {self.segment_nbytes} bytes of process {place.process_index}"
            )
        return place
