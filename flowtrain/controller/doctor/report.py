"""What ``flowtrain doctor`` finds: nodes, links between them, and whether they fit a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.types.memory import HostMemory, Link, Tier
from flowtrain.types.nodes import NodeFacts

DOCTOR_SCHEMA = 2


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node."""

    name: str
    node_id: str
    num_cpus: float
    """As Ray counts them."""
    num_devices: float
    """As Ray counts them."""
    devices: tuple[str, ...]
    """Names of the device types."""
    ray_memory_nbytes: int
    """As Ray counts it."""
    memory: HostMemory
    facts: NodeFacts
    tiers: tuple[Tier, ...] = (Tier.DRAM,)
    """Tiers of the memory pool that this version can have there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the run needs of the cluster, and whether the cluster has it."""

    name: str
    fits: bool
    detail: str
    """What was found; if it does not fit, also the way out."""


@dataclass(frozen=True)
class DoctorReport:
    """What was found. pool_nbytes: all segments of the run together."""

    run: str
    pool_nbytes: int
    nodes: tuple[NodeReport, ...]
    links: tuple[Link, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run can start here."""
        return all(check.fits for check in self.checks)

    def as_record(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {"schema": DOCTOR_SCHEMA, "fits": self.fits, **asdict(self)}
