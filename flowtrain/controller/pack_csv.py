"""The steps of a run whose samples are the rows of a CSV, with a configuration of their own or without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain.actors.make_flow import make_planner
from flowtrain.config.data import DataConfig, SourceConfig
from flowtrain.config.load import override_config
from flowtrain.config.model import BackboneConfig, EncoderConfig
from flowtrain.config.run import RunConfig
from flowtrain.config.training import TrainingConfig
from flowtrain.controller.pack import DEFAULT_STEPS, Workload, WorkloadStep
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.data.units import num_steps_of, unit_sequence
from flowtrain.errors import DataError
from flowtrain.scheduler.cost import CostModel, make_cost_model
from flowtrain.scheduler.cost_profile import read_cost_profile
from flowtrain.types import RejectReason

_ALONE = RunConfig(
    name="lengths",
    encoders={"vision": EncoderConfig(config={})},
    backbone=BackboneConfig(config={}, data_parallel_size=8),
    data=DataConfig(sources=(SourceConfig(path="lengths.csv"),), max_seq_len=8),
    training=TrainingConfig(global_batch_size=256, num_epochs=1),
)
"""What a CSV that comes without a configuration is packed for; there is no model in it."""


def workload_alone(path: str, overrides: Sequence[str] = (), num_steps: int | None = None) -> Workload:
    """Return the steps of a CSV that comes without a configuration; raises ConfigError and DataError.

    Settings are the defaults, 8 ranks, 256 samples a step and one epoch, with overrides applied; ``data.max_seq_len``
    is what a microbatch holds, unless it is given. A given ``scheduler.cost_profile`` is taken as it is: there is no
    model that it could be held against.
    """
    microbatch_tokens = override_config(_ALONE, overrides, check_paths=False).scheduler.microbatch_tokens
    config = override_config(_ALONE, [f"data.max_seq_len={microbatch_tokens}", *overrides], check_paths=False)
    profile = config.scheduler.cost_profile
    fitted = read_cost_profile(profile).fitted.model if profile is not None else None
    cost = make_cost_model(config.scheduler.cost, microbatch_tokens, profile=fitted)
    return _workload(LengthsFile.read(path), config, cost, num_steps)


def workload_of(path: str, config: RunConfig, num_steps: int | None = None) -> Workload:
    """Return the steps of a run that has the rows of a CSV as its samples; raises ConfigError and DataError."""
    scheduler = config.scheduler
    if scheduler.cost in ("flops", "profile"):  # only these need the model, whose libraries take seconds to import
        from flowtrain.controller.predict import run_cost

        cost = run_cost(config)
    else:
        cost = make_cost_model(scheduler.cost, scheduler.microbatch_tokens)
    return _workload(LengthsFile.read(path), config, cost, num_steps)


def _workload(file: LengthsFile, config: RunConfig, cost: CostModel, num_steps: int | None) -> Workload:
    data, num_rows = config.data, len(file.lengths)
    num_long, rejects = file.num_oversized(data.max_seq_len), data.oversized == "reject"
    if rejects and num_long == num_rows:
        raise DataError(
            f"lengths {file.path}: all {num_rows:,} rows have more tokens than data.max_seq_len ({data.max_seq_len}); "
            "raise it, and scheduler.microbatch_tokens with it"
        )
    all_steps, total_positions = num_steps_of(config.training, [num_rows])
    count = min(num_steps or DEFAULT_STEPS, all_steps)
    planner = make_planner(config, config.backbone.data_parallel_size, cost)
    sampler = file.sampler(config.seed, data.shuffle)
    steps, num_rejected = [], 0
    for unit in unit_sequence(count, config.training.global_batch_size, total_positions, None, 0):
        rows = np.array([ref.row for ref in sampler.take(unit.num_positions)])
        lengths = file.treated(rows, data)
        steps.append(WorkloadStep(lengths, planner.rules(unit)))
        num_rejected += len(rows) - len(lengths)
    order = f"shuffled by seed {config.seed}, as a run does" if data.shuffle else "in the file's order"
    return Workload(
        config=config,
        source=f"{file.path}: {num_rows:,} rows, {order}",
        order=f"the first {count:,} of {all_steps:,} steps",
        vision_unit="image tiles",
        steps=tuple(steps),
        rejected={RejectReason.OVERSIZED_SAMPLE.value: num_rejected} if num_rejected else {},
        notes=(_oversized_note(config, num_long, rejects),) if num_long else (),
    )


def _oversized_note(config: RunConfig, num_long: int, rejects: bool) -> str:
    longer = f"{num_long:,} rows of the file have more than data.max_seq_len ({config.data.max_seq_len:,}) tokens"
    if rejects:
        return f"{longer}; data.oversized rejects them, so their steps have fewer samples"
    return (
        f"{longer}; data.oversized cuts them to it (a run would reject those whose images alone are longer, which a "
        "CSV does not tell)"
    )
