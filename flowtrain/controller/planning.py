"""From settings, a model and its data to an allocation that can be shown, saved and started. No Ray, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.cluster import Cluster, DeviceType, data_sheet_device_type
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.model_file import read_model_file
from flowtrain.allocator.plan import ModulePlan, Plan, degree_overrides, fixed_plan
from flowtrain.allocator.request import Request
from flowtrain.allocator.roofline import Efficiency, Roofline
from flowtrain.allocator.solvers import Solver, SolverName
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.allocator.workload import Workload
from flowtrain.config.load import override_config
from flowtrain.config.messages import Document, render_validation
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import YamlError, parse_yaml
from flowtrain.costs.memory import TrainingSetup
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.errors import ConfigError

PLANNING_SCHEMA = 1
DEVICES_PER_NODE = 8
MODEL_FILE_BATCH_PATCHES = 16384
"""Patches of an encoder's largest batch, where a model file is planned: a few large pictures."""

_MODEL_FILE_KEYS = re.compile(
    r"model\.(dtype|freeze)|training\.(global_batch_size|optimizer)|scheduler\.(microbatch_tokens|lookahead_steps)|"
    r"backbone\.(activation_checkpointing|checkpoint_every|sharding|attention|num_cpus)|"
    r"encoders\.\w+\.(max_batch_patches|segment_nbytes|num_cpus)|pool\.(hbm_segment_nbytes|text_segment_nbytes)"
)
"""What decides a plan beside the shapes and samples in the file itself."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be planned: settings, shapes and data.

    source: where shapes and sizes are from. num_devices: that the configuration's own degrees take, None where it has
    none.
    """

    config: RunConfig
    model: ModelSpec
    workload: Workload
    source: str
    num_devices: int | None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """An allocation, what it rests on, and the plan that starts it."""

    planned: Planned
    device_type: DeviceType
    setup: TrainingSetup
    budget: MemoryBudget
    efficiency: Efficiency
    allocation: Allocation
    plan: Plan

    @property
    def overrides(self) -> tuple[str, ...]:
        """The plan's degrees as changes to a configuration."""
        return degree_overrides(self.plan)

    @property
    def features_nbytes(self) -> int:
        """Bytes of the features that the pool holds when encoders are as far ahead as they may be: of mean samples."""
        workload, ahead = self.planned.workload, self.planned.config.scheduler.lookahead_steps
        rows = workload.global_batch_size * float(workload.vision_lengths.mean())
        return int((1 + ahead) * rows * self.planned.model.connector.feature_dim * self.setup.dtype_nbytes)

    @property
    def segments_nbytes(self) -> int:
        """Bytes that all encoders of the plan give to the pool."""
        return sum(module.num_actors * module.segment_nbytes for module in self.plan.encoders.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before starting it."""
        return tuple(_notes(self))

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "schema": PLANNING_SCHEMA,
            "source": self.planned.source,
            "device": asdict(self.device_type),
            "allocation": self.allocation.to_dict(),
            "assumptions": {
                "efficiency": asdict(self.efficiency),
                "memory": asdict(self.budget),
                "fill": self.planned.workload.fill,
                "setup": asdict(self.setup),
            },
            "pool": {"features_nbytes": self.features_nbytes, "segments_nbytes": self.segments_nbytes},
            "overrides": list(self.overrides),
            "notes": list(self.notes),
        }


def make_report(
    planned: Planned, *, device: str, devices: int | None, nodes: int | None, solver: SolverName
) -> PlanReport:
    """Choose the degrees by Eq. 2 of FlowTrain 3.3 on devices by their data sheet; ConfigError where nothing fits."""
    config = planned.config
    count, per_node = _node_shape(planned, devices, nodes)
    device_type = data_sheet_device_type(device, count, devices_per_node=per_node, dtype=config.model.dtype)
    cluster, setup, efficiency = Cluster((device_type,)), _setup(config), Efficiency()
    budget = MemoryBudget(pool_nbytes=config.pool.hbm_segment_nbytes)
    limits = {name: encoder.max_batch_patches for name, encoder in config.encoders.items()}
    request = Request(cluster, planned.model, planned.workload, setup, budget, limits)
    times = {device_type.name: Roofline(device_type, planned.model, planned.workload, setup, efficiency)}
    surrogate = Surrogate(cluster, planned.model, planned.workload, setup, times, efficiency.links)
    allocation = allocate(request, surrogate, Solver(solver))
    return PlanReport(planned, device_type, setup, budget, efficiency, allocation, _plan(config, allocation))


def is_model_file(path: str | PathLike[str]) -> bool:
    """Whether a YAML brings its own workload, as those of ``configs/models`` do; one that cannot be read does not."""
    try:
        values = parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"))[0]
    except (OSError, UnicodeDecodeError, YamlError):
        return False
    return isinstance(values, dict) and "workload" in values


def planned_model(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Planned:
    """Read a model file; overrides change what decides its plan beside shapes and samples. Raises ConfigError.

    Settings that the file has not are a run's defaults, but bfloat16, full recomputation and large encode batches.
    """
    file = read_model_file(Path(path).expanduser())
    for text in overrides:
        if not _MODEL_FILE_KEYS.fullmatch(text.partition("=")[0].strip()):
            raise ConfigError(
                f"override {text!r}: a model file takes no such key, only settings that decide its plan, e.g. "
                f"scheduler.microbatch_tokens or backbone.activation_checkpointing; change {path} itself"
            )
    workload, encoder = file.workload, {"config": {}, "max_batch_patches": MODEL_FILE_BATCH_PATCHES}
    values = {
        "name": file.name,
        "model": {"dtype": "bfloat16"},
        "encoders": dict.fromkeys(file.model.encoders, encoder),
        "backbone": {"config": {}, "activation_checkpointing": "full"},
        "data": {"sources": [{"path": str(path)}], "max_seq_len": int(workload.lengths.max())},
        "training": {"global_batch_size": workload.global_batch_size, "max_steps": 1},
        "scheduler": {"microbatch_tokens": workload.microbatch_tokens},
    }
    try:
        config = override_config(RunConfig.model_validate(values), overrides, check_paths=False)
    except ValidationError as error:  # what runs do not support yet, as several encoders
        raise ConfigError(render_validation(Document(str(path), values), error)) from error
    workload = replace(
        workload,
        global_batch_size=config.training.global_batch_size,
        microbatch_tokens=config.scheduler.microbatch_tokens,
        freeze=config.model.freeze,
    )
    return Planned(config, file.model, workload, f"model file {file.name}", num_devices=None)


def _node_shape(planned: Planned, devices: int | None, nodes: int | None) -> tuple[int, int]:
    """Devices in all and on a node."""
    if devices is None and nodes is None:
        if planned.num_devices is None:
            raise ConfigError(f"{planned.source} has no degrees of its own; give --devices or --nodes")
        return planned.num_devices, DEVICES_PER_NODE
    if nodes is None or devices is None:
        return devices or (nodes or 0) * DEVICES_PER_NODE, DEVICES_PER_NODE
    if devices % nodes:
        raise ConfigError(
            f"--devices ({devices}) is no multiple of --nodes ({nodes}): nodes have equally many devices; take "
            f"{devices - devices % nodes} or {devices + nodes - devices % nodes} devices"
        )
    return devices, devices // nodes


def _setup(config: RunConfig) -> TrainingSetup:
    backbone = config.backbone
    return TrainingSetup(
        dtype=config.model.dtype,
        sharding=backbone.sharding,
        activation_checkpointing=backbone.activation_checkpointing,
        checkpoint_every=backbone.checkpoint_every,
        optimizer=config.training.optimizer,
        attention="flash_attn" if backbone.attention == "auto" else backbone.attention,
    )


def _plan(config: RunConfig, allocation: Allocation) -> Plan:
    """What the configuration says of actors, with the allocation's degrees."""
    fixed, chosen = fixed_plan(config, use_devices=True), {each.name: each.degrees for each in allocation.modules}

    def with_degrees(name: str, module: ModulePlan) -> ModulePlan:
        dp, pp, tp = chosen[name].dp, chosen[name].pp, chosen[name].tp
        return replace(module, data_parallel_size=dp, tensor_parallel_size=tp, pipeline_parallel_size=pp)

    encoders = {name: with_degrees(name, module) for name, module in fixed.encoders.items()}
    return replace(fixed, encoders=encoders, backbone=with_degrees("backbone", fixed.backbone))


def _notes(report: PlanReport) -> Iterator[str]:
    config, degrees = report.planned.config, report.plan.backbone.degrees
    idle = report.device_type.count - report.allocation.devices
    if idle:
        yield f"{idle} of {report.device_type.count} devices stay free: no faster choice takes them"
    if config.backbone.pipeline_schedule != "1f1b":
        yield f"the rates are of 1f1b; backbone.pipeline_schedule ({config.backbone.pipeline_schedule}) is not modelled"
    faults = degree_faults(degrees, report.planned.model.backbone, chunks_per_rank=config.backbone.chunks_per_rank)
    try:
        override_config(config, report.overrides, check_paths=False)
    except ConfigError as error:
        faults.append(str(error))
    yield from (f"a run refuses this plan: {fault}" for fault in faults)
    if report.segments_nbytes < report.features_nbytes:
        least = -(-report.features_nbytes // sum(module.num_actors for module in report.plan.encoders.values()))
        yield (
            "the pool holds less than scheduler.lookahead_steps ask for, so encoders wait for room; "
            + " ".join(f"encoders.{name}.segment_nbytes={least}" for name in report.plan.encoders)
            + " holds it"
        )
