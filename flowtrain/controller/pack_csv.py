"""The steps of a run whose samples are the rows of a CSV, with or without a configuration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain.config.data import DataConfig, SourceConfig
from flowtrain.config.load import override_config
from flowtrain.config.model import BackboneConfig, EncoderConfig
from flowtrain.config.run import RunConfig
from flowtrain.config.training import TrainingConfig
from flowtrain.controller.pack import DEFAULT_STEPS, Workload, first_steps
from flowtrain.costs.microbatch_costs import MicrobatchCosts
from flowtrain.data.lengths_file import BLOCK_ROWS, LengthsFile
from flowtrain.errors import ConfigError
from flowtrain.flow.units import num_steps_of, unit_sequence
from flowtrain.scheduler.cost import make_cost_model
from flowtrain.scheduler.report import WorkloadStep
from flowtrain.scheduler.run_cost import read_microbatch_costs
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.plan import CostModel
from flowtrain.types.samples import RejectReason

_ALONE = RunConfig(
    name="lengths",
    encoders={"vision": EncoderConfig(config={})},
    backbone=BackboneConfig(config={}, data_parallel_size=8),
    data=DataConfig(sources=(SourceConfig(path="lengths.csv"),), max_seq_len=8),
    training=TrainingConfig(global_batch_size=256, num_epochs=1),
)
"""The configuration for a CSV without one; it has no model."""


def workload_alone(path: str, overrides: Sequence[str] = (), num_steps: int | None = None) -> Workload:
    """Return the steps of a CSV without a configuration; raises ConfigError.

    Settings are the defaults, 8 ranks, 256 samples a step and one epoch, with overrides applied. ``data.max_seq_len``
    is the capacity of a microbatch, unless it is given. A given ``scheduler.cost_profile`` is used unchecked: there is
    no model to compare it with.
    """
    # Arrival order needs no cost profile, so validation passes without one; the error below suits a CSV.
    scheduler = override_config(_ALONE, [*overrides, "data.order=arrival"], check_paths=False).scheduler
    if scheduler.cost == "profile" and scheduler.cost_profile is None:
        raise ConfigError(
            f"{path}: scheduler.cost ('profile') needs scheduler.cost_profile, as no run fits costs to a CSV; give the "
            "profile.json that a run wrote into its directory, or choose scheduler.cost=eq3"
        )
    capacity = scheduler.microbatch_tokens
    config = override_config(_ALONE, [f"data.max_seq_len={capacity}", *overrides], check_paths=False)
    if scheduler.cost != "profile" or scheduler.cost_profile is None:
        return _workload(LengthsFile.read(path), config, make_cost_model(scheduler.cost, capacity), num_steps)
    costs = read_microbatch_costs(scheduler.cost_profile)
    cost = make_cost_model(scheduler.cost, capacity, profile=costs.fitted.model)
    return _workload(LengthsFile.read(path), config, cost, num_steps, _extrapolation_notes(costs, capacity))


def workload_of(path: str, config: RunConfig, num_steps: int | None = None) -> Workload:
    """Return the steps of a run whose samples are the rows of a CSV; raises ConfigError."""
    scheduler = config.scheduler
    if scheduler.cost in ("flops", "profile"):  # only these need the model; its libraries take seconds to import
        from flowtrain.controller.predict import run_cost

        cost = run_cost(config)
    else:
        cost = make_cost_model(scheduler.cost, scheduler.microbatch_tokens)
    return _workload(LengthsFile.read(path), config, cost, num_steps)


def _workload(
    file: LengthsFile, config: RunConfig, cost: CostModel, num_steps: int | None, notes: tuple[str, ...] = ()
) -> Workload:
    data, num_rows = config.data, len(file.lengths)
    num_long, rejects = file.num_oversized(data.max_seq_len), data.oversized == "reject"
    if rejects and num_long == num_rows:
        raise ConfigError(
            f"lengths {file.path}: every row ({num_rows:,} in all) has more tokens than data.max_seq_len "
            f"({data.max_seq_len}); raise it, and scheduler.microbatch_tokens with it"
        )
    all_steps, total_positions = num_steps_of(config.training, [num_rows])
    count = min(num_steps or DEFAULT_STEPS, all_steps)
    planner = StepPlanner.from_config(config, config.backbone.data_parallel_size, cost)
    sampler = file.sampler(config.seed, data.shuffle, data.shuffle_blocks)
    steps, num_rejected = [], 0
    for unit in unit_sequence(count, config.training.global_batch_size, total_positions):
        rows = np.array([draw.ref.row for draw in sampler.take(unit.num_positions)])
        lengths = file.treated(rows, data)
        steps.append(WorkloadStep(lengths, planner.rules(unit), unit.num_positions))
        num_rejected += len(rows) - len(lengths)
    return Workload(
        config=config,
        source=f"{file.path}: {num_rows:,} {'row' if num_rows == 1 else 'rows'}, {_order(config)}",
        order=first_steps(count, all_steps),
        vision_unit="image tiles",
        steps=tuple(steps),
        rejected={RejectReason.OVERSIZED_SAMPLE.value: num_rejected} if num_rejected else {},
        source_notes=(
            *([_oversized_note(config, num_long, rejects)] if num_long else []),
            *notes,
            *_policy_notes(config),
            _NO_PLANS,
        ),
    )


def _order(config: RunConfig) -> str:
    """Say in which order the rows come."""
    data = config.data
    if data.shuffle == "none":
        return "in the file's order"
    if data.shuffle == "rows":
        return f"shuffled row by row, by seed {config.seed}"
    return f"shuffled in blocks of {BLOCK_ROWS} rows, {data.shuffle_blocks} mixed, by seed {config.seed}"


_NO_PLANS = (
    "a CSV has lengths and no samples: the figures show how these lengths pack and do not predict a run's plans (with "
    "--json, digest is null), and no step is simulated"
)


def _policy_notes(config: RunConfig) -> tuple[str, ...]:
    """The search times images and targets of samples, and a CSV has none."""
    if config.pipeline.policy != "pipetune":
        return ()
    return (
        "pipeline.policy is 'pipetune', which a CSV cannot show: the search needs the samples themselves; packed as "
        "with 'none' (a configuration without --lengths shows the run's own plans)",
    )


def _extrapolation_notes(costs: MicrobatchCosts, capacity: int) -> tuple[str, ...]:
    """A run with such a profile would be refused; for a CSV a note is enough."""
    if capacity <= costs.capacity:
        return ()
    return (
        f"scheduler.cost_profile was fitted at {costs.capacity:,} tokens a microbatch; the costs of "
        f"{capacity:,} here are extrapolated",
    )


def _oversized_note(config: RunConfig, num_long: int, rejects: bool) -> str:
    verb, them = ("row of the file has", "it") if num_long == 1 else ("rows of the file have", "them")
    longer = f"{num_long:,} {verb} more than data.max_seq_len ({config.data.max_seq_len:,}) tokens"
    if rejects:
        return f"{longer}; data.oversized rejects {them}, so steps have fewer samples"
    return (
        f"{longer}; data.oversized cuts {them} to that (a run would reject a sample whose images alone are longer, "
        "but a CSV does not show that)"
    )
