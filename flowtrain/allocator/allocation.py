"""What the allocator hands out: the chosen configurations, why, and what was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.types.plan import Degrees

ALLOCATION_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ModuleAllocation:
    """One module's configuration.

    name: an encoder's, followed by ``@`` and its type of devices where there are several, or ``backbone``. share: of
    the samples that it has work for. rate: samples/s of those; production: samples/s of the whole data that this rate
    keeps up with. peak_nbytes: predicted, of memory_nbytes that a device has
    for it. mfu: of its own devices, while it never waits. waiting: expected share of its time, starved or blocked.
    """

    name: str
    device_type: str
    degrees: Degrees
    share: float
    rate: float
    production: float
    peak_nbytes: int
    memory_nbytes: int
    mfu: float
    waiting: float

    @property
    def devices(self) -> int:
        """Devices that it takes."""
        return self.degrees.world_size

    @property
    def encoder(self) -> str:
        """The encoder that it is, wherever it lies."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice and why it lost; degrees and devices by module."""

    degrees: dict[str, Degrees]
    devices: dict[str, int]
    rate: float
    imbalance: float
    reason: str


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A point of the rate-over-split curve: devices of the backbone and of all encoders, and samples/s.

    consumption: what the backbone takes. production: what encoders make on all devices that it leaves; encoder_devices
    are those that they need for ``rate``, the smaller of both.
    """

    backbone_devices: int
    encoder_devices: int
    rate: float
    consumption: float
    production: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each part of the search; alternatives_s: to find those that lost."""

    enumeration_s: float
    surrogate_s: float
    solve_s: float
    alternatives_s: float

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.enumeration_s + self.surrogate_s + self.solve_s + self.alternatives_s


@dataclass(frozen=True, slots=True)
class Allocation:
    """The optimum of Eq. 2 (FlowTrain 3.3).

    modules: encoders, then the backbone. rate: samples/s of the whole run. imbalance: by how much production misses
    demand, in samples/s. bottleneck: the module that sets the rate. starved: expected share of the backbone's time.
    budget: devices by type. pruned: by module and reason, configurations left out. num_candidates, num_front: by
    module, configurations that are feasible, and those of them that are worth choosing. num_combinations: of feasible
    configurations over all modules. num_variables: of the program. split_curve: for one type of devices;
    production_curve: then, devices of all encoders and the samples/s that they make on these. shared: all modules take
    turns on one device; rate_apart: samples/s with a device for each of them, None where nothing is shared. rate_added:
    samples/s with an encoder's replicas on several types of devices, where that is more; no run can start it yet.
    """

    modules: tuple[ModuleAllocation, ...]
    rate: float
    imbalance: float
    bottleneck: str
    starved: float
    budget: dict[str, int]
    pruned: dict[str, dict[str, int]]
    num_candidates: dict[str, int]
    num_front: dict[str, int]
    num_combinations: int
    num_variables: int
    alternatives: tuple[Alternative, ...]
    split_curve: tuple[SplitPoint, ...]
    production_curve: tuple[tuple[int, float], ...]
    solver: str
    timings: Timings
    shared: bool = False
    rate_apart: float | None = None
    rate_added: float | None = None
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
