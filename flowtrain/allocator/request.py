"""The request to the allocator, and the steps from it to Eq. 2 of FlowTrain 3.3: enumerate, predict, reduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowtrain.allocator.candidates import (
    Candidate,
    CandidateColumns,
    Enumeration,
    enumerate_backbone,
    enumerate_encoder,
)
from flowtrain.allocator.memory import MemoryBudget, backbone_peak_nbytes
from flowtrain.allocator.pareto import pareto_front
from flowtrain.allocator.program.flow import FlowProblem, Module
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.cluster import Cluster, DeviceType
from flowtrain.costs.memory import encoder_peak_nbytes
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees

Key = tuple[str, str]
"""(module, type of device)"""


@dataclass(frozen=True, slots=True)
class Request:
    """The devices, the model and the settings of one allocation."""

    cluster: Cluster
    """The devices that may be used."""
    model: ModelSpec
    workload: Workload
    setup: TrainingSetup
    """Its dp and tp are ignored."""
    budget: MemoryBudget
    max_batch_patches: Mapping[str, int]
    """Patches of an encoder's largest batch, by encoder."""
    chunks_per_rank: int = 1
    """Slices of the backbone's layers that each pipeline rank holds."""
    whole: frozenset[str] = frozenset()
    """Modules whose layers cannot be split by tensor parallelism."""

    def __post_init__(self) -> None:
        for name in self.model.encoders:
            if self.workload.share(name) == 0.0:
                raise ConfigError(
                    f"no sample has images for encoders.{name}, so its rate cannot be balanced; check data.sources or "
                    "leave the encoder out"
                )

    def memory_nbytes(self, module: str, device_type: str) -> int:
        """Bytes that a module may use on each device."""
        return self.budget.module_nbytes(self.cluster[device_type], is_encoder=module != BACKBONE)

    def peak_nbytes(self, module: str, degrees: Degrees) -> int:
        """Predicted peak bytes on a module's fullest device."""
        if module == BACKBONE:
            return backbone_peak_nbytes(self.model, self.workload, self.setup, degrees, self.chunks_per_rank)
        return encoder_peak_nbytes(
            self.model.encoders[module],
            degrees.tp,
            max_batch_patches=self.max_batch_patches[module],
            dtype_nbytes=self.setup.dtype_nbytes,
        )


def enumerate_module(request: Request, module: str, device_type: DeviceType) -> Enumeration:
    """Return the feasible configurations of one module on one type of devices."""

    def peak_nbytes(degrees: Degrees) -> int:
        return request.peak_nbytes(module, degrees)

    memory_nbytes = request.memory_nbytes(module, device_type.name)
    if module == BACKBONE:
        return enumerate_backbone(
            device_type,
            request.model.backbone,
            global_batch_size=request.workload.global_batch_size,
            peak_nbytes=peak_nbytes,
            memory_nbytes=memory_nbytes,
            chunks_per_rank=request.chunks_per_rank,
            splits_tensors=module not in request.whole,
        )
    return enumerate_encoder(
        device_type,
        request.model.encoders[module],
        module=module,
        peak_nbytes=peak_nbytes,
        memory_nbytes=memory_nbytes,
        splits_tensors=module not in request.whole,
    )


def enumerate_all(request: Request) -> dict[Key, Enumeration]:
    """Return the feasible configurations of every module on every type of devices."""
    return {
        (module, device_type.name): enumerate_module(request, module, device_type)
        for module in (*request.model.encoders, BACKBONE)
        for device_type in request.cluster.device_types
    }


def flow_problem(request: Request, fronts: Mapping[Key, tuple[Candidate, ...]]) -> FlowProblem:
    """Return Eq. 2 over these fronts; with several types of devices, an encoder's replicas may be on any of them."""
    types = [device_type.name for device_type in request.cluster.device_types]
    several = len(types) > 1
    producers = tuple(
        Module(f"{name}@{each}" if several else name, name, fronts[name, each], optional=several)
        for name in request.model.encoders
        for each in types
    )
    return FlowProblem(
        producers,
        tuple(candidate for each in types for candidate in fronts[BACKBONE, each]),
        {name: request.workload.share(name) for name in request.model.encoders},
        request.cluster.counts,
    )


def front(columns: CandidateColumns, surrogate: Surrogate) -> tuple[Candidate, ...]:
    """Return the configurations worth choosing, with their rates; ties: the smallest pp, then the smallest tp."""
    if not len(columns):
        return ()
    rates = surrogate.rates(columns)
    chosen = pareto_front(columns.devices, rates, columns.pp, columns.tp)
    return tuple(columns.candidate(int(index), float(rates[index])) for index in chosen)
