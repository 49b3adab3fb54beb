"""The allocator's answer: the chosen configurations, why, and what was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.types.plan import Degrees

ALLOCATION_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ModuleAllocation:
    """One module's configuration."""

    name: str
    """``backbone`` or an encoder's, with ``@`` and its type of devices where there are several."""
    device_type: str
    degrees: Degrees
    share: float
    """Share of all samples that it has work for."""
    rate: float
    """Samples/s of those."""
    production: float
    """Samples/s of the whole data that this rate keeps up with."""
    peak_nbytes: int
    """Predicted, on its fullest device."""
    memory_nbytes: int
    """What a device has for it."""
    mfu: float
    """Of its own devices, while it never waits."""
    waiting: float
    """Expected share of its time, starved or blocked."""

    @property
    def devices(self) -> int:
        """Devices that it takes."""
        return self.degrees.world_size

    @property
    def encoder(self) -> str:
        """The encoder's name, without the type of devices."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice and why it lost."""

    degrees: dict[str, Degrees]
    """By module."""
    devices: dict[str, int]
    """Number of devices, by module."""
    rate: float
    """Samples/s of the whole run."""
    imbalance: float
    """As of ``Allocation``."""
    reason: str
    """Why it lost, for people."""


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A point of the rate-over-split curve."""

    backbone_devices: int
    encoder_devices: int
    """What all encoders need for ``rate``."""
    rate: float
    """Samples/s of the whole run, the smaller of consumption and production."""
    consumption: float
    """Samples/s that the backbone consumes."""
    production: float
    """Samples/s that encoders produce on all devices that the backbone leaves."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each part of the search."""

    enumeration_s: float
    surrogate_s: float
    solve_s: float
    alternatives_s: float
    """Of finding the choices that lost."""

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.enumeration_s + self.surrogate_s + self.solve_s + self.alternatives_s


@dataclass(frozen=True, slots=True)
class Allocation:
    """The optimum of Eq. 2 (FlowTrain 3.3)."""

    modules: tuple[ModuleAllocation, ...]
    """Encoders, then the backbone."""
    rate: float
    """Samples/s of the whole run."""
    imbalance: float
    """By how much production misses demand, in samples/s."""
    bottleneck: str
    """The module that sets the rate."""
    starved: float
    """Expected share of the backbone's time."""
    budget: dict[str, int]
    """Number of devices, by type."""
    pruned: dict[str, dict[str, int]]
    """Configurations left out, by module and reason."""
    num_candidates: dict[str, int]
    """Feasible configurations, by module."""
    num_front: dict[str, int]
    """Feasible configurations worth choosing, by module."""
    num_combinations: int
    """Of feasible configurations over all modules."""
    num_variables: int
    """Of the program; 0 where nothing is left to choose."""
    alternatives: tuple[Alternative, ...]
    split_curve: tuple[SplitPoint, ...]
    """Empty with several types of devices."""
    production_curve: tuple[tuple[int, float], ...]
    """Devices of all encoders, and the samples/s that they produce on these; empty with several types of devices."""
    solver: str
    """Which solved the program; ``none`` where nothing is left to choose."""
    timings: Timings
    shared: bool = False
    """All modules share one device, one after the other."""
    rate_apart: float | None = None
    """Samples/s with a device for each module; None where nothing is shared."""
    rate_added: float | None = None
    """Samples/s with an encoder's replicas on several types of devices; None where that is not more.

    No run can start it yet."""
    schema: int = ALLOCATION_SCHEMA

    @property
    def devices(self) -> int:
        """Devices that are taken."""
        return 1 if self.shared else sum(module.devices for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or YAML."""
        values = asdict(self)
        values["devices"] = self.devices
        for module, plain in zip(self.modules, values["modules"], strict=True):
            plain["devices"] = module.devices
        return values
