"""The request to the allocator, and the steps from it to Eq. 2 of FlowTrain 3.3: enumerate, predict, reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain.allocator.candidates import (
    Candidate,
    CandidateColumns,
    Enumeration,
    backbone_columns,
    enumerate_encoder,
)
from flowtrain.allocator.memory import MemoryBudget, backbone_memory, backbone_peaks
from flowtrain.allocator.pareto import pareto_front
from flowtrain.allocator.program.flow import FlowProblem, Module
from flowtrain.allocator.settings_search import Alike, PeakMemo, Variant, search_settings
from flowtrain.allocator.shards import num_shards
from flowtrain.allocator.slices import ONE_EACH, Slices
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.cluster import Cluster, DeviceType
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.memory import StepMemory, encoder_peak_nbytes
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import ReductionName, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings

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
    """Its dp and tp are ignored; its ``shard_size`` is the configured one, None for the replicas of a node."""
    budget: MemoryBudget
    max_batch_patches: Mapping[str, int]
    """Patches of an encoder's largest batch, by encoder."""
    slices: Slices = ONE_EACH
    """How pipeline ranks share the backbone's layers."""
    whole: frozenset[str] = frozenset()
    """Modules whose layers cannot be split by tensor parallelism."""
    chooses_reduction: bool = False
    """Each configuration of the backbone reduces gradients once a step if that fits, else with each microbatch; if
    False all do as ``setup`` says."""
    choices: tuple[BackboneSettings, ...] = ()
    """Settings that the backbone may have; empty: it has those of the fields above. The first one is preferred among
    equals."""
    settings: BackboneSettings | None = None
    """The one of ``choices`` that the fields above have; None if nothing was chosen."""
    _with_settings: dict[BackboneSettings, Request] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.model.encoders:
            if self.workload.share(name) == 0.0:
                raise ConfigError(
                    f"no sample has images for encoders.{name}, so its rate cannot be balanced; check data.sources or "
                    "leave the encoder out"
                )

    def with_settings(self, settings: BackboneSettings) -> Request:
        """Return the request with these settings of the backbone, and nothing left to choose but the reduction."""
        if settings not in self._with_settings:
            self._with_settings[settings] = self._made_with(settings)
        return self._with_settings[settings]

    def _made_with(self, settings: BackboneSettings) -> Request:
        setup = self.setup
        if settings.activation_checkpointing is not None:
            setup = replace(setup, activation_checkpointing=settings.activation_checkpointing)
        if settings.sharding is not None:
            setup = replace(setup, sharding=settings.sharding)
        return replace(
            self,
            workload=replace(self.workload, microbatch_tokens=settings.microbatch_tokens),
            setup=setup,
            slices=replace(self.slices, chunks=settings.chunks),
            choices=(),
            settings=settings,
        )

    def of(self, candidate: Candidate) -> Request:
        """Return the request with a candidate's settings."""
        return self if candidate.settings in (None, self.settings) else self.with_settings(candidate.settings)

    def decided(self) -> Request:
        """Return the request with the first of its choices, for what does not depend on them."""
        return self.with_settings(self.choices[0]) if self.choices else self

    def memory_nbytes(self, module: str, device_type: str) -> int:
        """Bytes that a module may use on each device."""
        return self.budget.module_nbytes(self.cluster[device_type], is_encoder=module != BACKBONE)

    def peak_nbytes(self, candidate: Candidate) -> int:
        """Predicted peak bytes on a module's fullest device."""
        if candidate.module == BACKBONE:
            return self.backbone_memory(candidate).peak
        return encoder_peak_nbytes(
            self.model.encoders[candidate.module],
            candidate.degrees.tp,
            max_batch_patches=self.max_batch_patches[candidate.module],
            dtype_nbytes=self.setup.dtype_nbytes,
        )

    def backbone_memory(self, candidate: Candidate) -> StepMemory:
        """Predicted memory of the backbone's fullest rank."""
        at, shards = self.of(candidate), self.num_shards(candidate)
        setup = replace(at.setup, shard_size=shards, gradient_reduction=candidate.gradient_reduction)
        return backbone_memory(self.model, at.workload, setup, candidate.degrees, at.slices)

    def shards_of(self, columns: CandidateColumns) -> IntArray:
        """DP ranks that hold one set of shards, ``[C]``; 0 where hybrid sharding cannot form equal groups."""
        per_node = self.cluster[columns.device_type].devices_per_node
        return num_shards(self.setup, columns.dp, columns.pp * columns.tp, per_node)

    def num_shards(self, candidate: Candidate) -> int:
        """DP ranks of the backbone that hold one set of shards."""
        return int(self.of(candidate).shards_of(CandidateColumns.of(candidate))[0])

    def backbone(self, degrees: Degrees, device_type: str, memory_nbytes: int) -> Candidate:
        """Return a configuration of the backbone with the reduction of gradients that it has in so much memory."""
        once = Candidate(BACKBONE, device_type, degrees, gradient_reduction=self.reduction("step", degrees))
        if not self.chooses_reduction or degrees.dp == 1 or self.peak_nbytes(once) <= memory_nbytes:
            return once
        return replace(once, gradient_reduction="microbatch")

    def reduction(self, chosen: ReductionName, degrees: Degrees) -> ReductionName:
        """``chosen`` if there is a choice; a single replica has nothing to reduce."""
        if degrees.dp == 1:
            return "step"
        return chosen if self.chooses_reduction else self.setup.gradient_reduction


SurrogateFactory = Callable[[Request], Surrogate]
"""Returns the surrogate of a request with nothing left to choose."""


Memos = Mapping[str, PeakMemo]
"""Peaks of the backbone of one request, by type of devices."""


def memos_of(request: Request) -> Memos:
    """Return empty memos, to share among enumerations of a request."""
    return {each.name: PeakMemo() for each in request.cluster.device_types}


def enumerate_module(
    request: Request,
    module: str,
    device_type: DeviceType,
    memory_nbytes: int | None = None,
    memos: Memos | None = None,
) -> Enumeration:
    """Return the feasible configurations of one module on one type of devices, the backbone's for all its choices.

    memory_nbytes: bytes that the backbone may use on each device; None: by the request's budget.
    """
    if module == BACKBONE:
        room = request.memory_nbytes(module, device_type.name) if memory_nbytes is None else memory_nbytes
        memo = (memos or memos_of(request))[device_type.name]
        if room not in memo.found:
            memo.found[room] = _enumerate_backbone(request, device_type, room, memo)
        return memo.found[room]
    return enumerate_encoder(
        device_type,
        request.model.encoders[module],
        module=module,
        peak_nbytes=lambda degrees: request.peak_nbytes(Candidate(module, device_type.name, degrees)),
        memory_nbytes=request.memory_nbytes(module, device_type.name),
        splits_tensors=module not in request.whole,
    )


def _enumerate_backbone(request: Request, device_type: DeviceType, memory_nbytes: int, memo: PeakMemo) -> Enumeration:
    requests = [request.with_settings(each) for each in request.choices] or [request]
    for chunks in {each.slices.chunks for each in requests} - memo.shapes.keys():
        memo.shapes[chunks] = backbone_columns(
            device_type,
            request.model.backbone,
            global_batch_size=request.workload.global_batch_size,
            chunks_per_rank=chunks,
            splits_tensors=BACKBONE not in request.whole,
        )
    reductions: tuple[ReductionName, ...] = (request.setup.gradient_reduction,)
    if request.chooses_reduction:
        reductions = ("step", "microbatch")

    def peaks_of(alike: Alike, reduction: ReductionName, places: IntArray) -> IntArray:
        variant, column = np.divmod(places, len(alike.columns))
        of_variants = [request if each is None else request.with_settings(each) for each in alike.settings]
        return backbone_peaks(
            request.model,
            [(each.workload, each.setup) for each in of_variants],
            of_variants[0].slices,
            alike.reducing(reduction)[column],
            variant,
            alike.num_shards.reshape(-1)[places],
            alike.num_microbatches.reshape(-1)[places],
        )

    variants = [_variant(each) for each in requests]
    return search_settings(variants, memo.shapes, memory_nbytes, reductions, peaks_of, memo)


def _variant(request: Request) -> Variant:
    return Variant(
        settings=request.settings,
        microbatch_tokens=request.workload.microbatch_tokens,
        chunks=request.slices.chunks,
        num_microbatches=request.workload.num_microbatches,
        num_shards=request.shards_of,
    )


def enumerate_all(request: Request, memos: Memos | None = None) -> dict[Key, Enumeration]:
    """Return the feasible configurations of every module on every type of devices."""
    return {
        (module, device_type.name): enumerate_module(request, module, device_type, memos=memos)
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


@dataclass(frozen=True, slots=True, eq=False)
class Rated:
    """Feasible configurations of one module over all settings, with their rates."""

    every: tuple[CandidateColumns, ...]
    """For each of the settings; none is empty."""
    rates: FloatArray
    """Samples/s of all, one after the other; ``[N]``."""

    def front(self, replica_size: int | None = None) -> tuple[Candidate, ...]:
        """Return the configurations worth choosing; replica_size: of those with so many devices a replica.

        Ties: the smallest pp, then the smallest tp, then the settings that come first.
        """
        if not self.every:
            return ()
        dp, pp, tp = (np.concatenate([getattr(each, name) for each in self.every]) for name in ("dp", "pp", "tp"))
        among = np.arange(len(dp)) if replica_size is None else np.flatnonzero(pp * tp == replica_size)
        dp, pp, tp = dp[among], pp[among], tp[among]
        starts = np.cumsum([0, *map(len, self.every)])
        chosen = among[pareto_front(dp * pp * tp, self.rates[among], pp, tp)]
        which = np.searchsorted(starts, chosen, side="right") - 1
        pairs = zip(which.tolist(), chosen.tolist(), strict=True)
        return tuple(self.every[at].candidate(index - int(starts[at]), float(self.rates[index])) for at, index in pairs)


def rated_of(
    request: Request, enumerations: Mapping[Key, Enumeration], surrogate_for: SurrogateFactory
) -> dict[Key, Rated]:
    """Return the rates of every module's configurations."""
    decided = surrogate_for(request.decided())

    def rated(every: Sequence[CandidateColumns]) -> Rated:
        rates = []
        for columns in every:
            settings = columns.settings
            surrogate = decided if settings is None else surrogate_for(request.with_settings(settings))
            rates.append(surrogate.rates(columns))
        return Rated(tuple(every), np.concatenate([np.zeros(0), *rates]))

    return {key: rated([columns for columns in found.every if len(columns)]) for key, found in enumerations.items()}


def fronts_of(
    request: Request, enumerations: Mapping[Key, Enumeration], surrogate_for: SurrogateFactory
) -> dict[Key, tuple[Candidate, ...]]:
    """Return the configurations worth choosing of every module, over all settings."""
    return {key: each.front() for key, each in rated_of(request, enumerations, surrogate_for).items()}
