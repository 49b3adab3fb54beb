"""The result of the allocator: the chosen configurations, the reasons, and the alternatives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flowtrain.allocator.program.flow import Choice
from flowtrain.config.allocator import AllocationMethod
from flowtrain.costs.memory import StepMemory
from flowtrain.costs.training_setup import ReductionName
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings

ALLOCATION_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ModuleAllocation:
    """One module's configuration."""

    name: str
    """``backbone`` or the encoder's name, with ``@`` and its type of device if there are several types."""
    device_type: str
    degrees: Degrees
    share: float
    """Share of all samples that it has work for."""
    rate: float
    """Samples/s, counting only samples that it has work for."""
    production: float
    """Samples/s of the whole data that this rate is enough for."""
    peak_nbytes: int
    """Predicted peak on its fullest device."""
    memory_nbytes: int
    """Memory of a device that it may use."""
    mfu: float
    """Model FLOPs utilisation of its devices while it does not wait."""
    waiting: float
    """Expected share of its time that it waits, starved or blocked."""
    gradient_reduction: ReductionName | None = None
    """Of the backbone; None for an encoder, as the three below."""
    num_shards: int | None = None
    """Data parallel ranks that hold one set of shards."""
    memory: StepMemory | None = None
    """What ``peak_nbytes`` consists of."""
    settings: BackboneSettings | None = None
    """Settings that were chosen for the backbone; None: as configured."""

    @property
    def devices(self) -> int:
        """Number of its devices."""
        return self.degrees.world_size

    @property
    def encoder(self) -> str:
        """The encoder's name, without the type of device."""
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
    """As in ``Allocation``."""
    reason: str
    """Why it lost, in words."""


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A point of the rate-over-split curve."""

    backbone_devices: int
    encoder_devices: int
    """Devices that all encoders together need for ``rate``."""
    rate: float
    """Samples/s of the whole run, the smaller of consumption and production."""
    consumption: float
    """Samples/s that the backbone consumes."""
    production: float
    """Samples/s that encoders produce on all devices that the backbone does not use."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each part of the search."""

    enumeration_s: float
    surrogate_s: float
    solve_s: float
    alternatives_s: float
    """Time to find the choices that lost."""

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
    """Difference between production and demand, in samples/s."""
    bottleneck: str
    """The module that sets the rate."""
    starved: float
    """Expected share of the backbone's time that it waits for encoders."""
    budget: dict[str, int]
    """Number of devices, by type."""
    pruned: dict[str, dict[str, int]]
    """Number of configurations left out, by module and reason."""
    num_candidates: dict[str, int]
    """Feasible configurations, by module."""
    num_front: dict[str, int]
    """Feasible configurations worth choosing (on the Pareto front), by module."""
    num_combinations: int
    """Combinations of feasible configurations over all modules."""
    num_variables: int
    """Variables of the program; 0 if there is no choice."""
    alternatives: tuple[Alternative, ...]
    split_curve: tuple[SplitPoint, ...]
    """Empty with several types of devices."""
    production_curve: tuple[tuple[int, float], ...]
    """(devices of all encoders, samples/s that they produce on these); empty with several types of devices."""
    solver: str
    """The solver that was used; ``none`` if there is no choice, else the method if it is not ``milp``."""
    timings: Timings
    shared: bool = False
    """All modules share one device, one after the other."""
    rate_apart: float | None = None
    """Samples/s with a separate device for each module; None if no device is shared."""
    rate_added: float | None = None
    """Samples/s with an encoder's replicas on several types of devices; None if that is not more.

    No run can start with that yet."""
    method: AllocationMethod = "milp"
    """``allocator.method``."""
    rate_milp: float | None = None
    """Samples/s of the plan that ``milp`` would give, if another method gave this one."""
    choices: tuple[Choice, ...] = ()
    """The best choices, the optimum first, for rates that are more exact; not in ``to_dict``."""
    schema: int = ALLOCATION_SCHEMA

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return 1 if self.shared else sum(module.devices for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or YAML."""
        values = asdict(replace(self, choices=()))
        del values["choices"]
        values["devices"] = self.devices
        for module, plain in zip(self.modules, values["modules"], strict=True):
            plain["devices"] = module.devices
        return values
