"""``mode: auto`` on the benchmark's cores: a profile that is measured first, and the plan of every mode."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from _modes_runs import COMMON, Variant, Workload

import flowtrain
from flowtrain.config.allocator import PLANNER_CHOICES
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.report import PlanReport
from flowtrain.types.run_plan import Plan

AUTO = "auto"
CHOICES = f"allocator.choose=[{', '.join(PLANNER_CHOICES)}]"
"""All modes choose the same settings; without it only ``auto`` would."""
DEVICES = 2
PLANNED = "planned_"
"""Names of runs with a mode's own plan begin with it."""


@dataclass(frozen=True)
class Predicted:
    """What the planner says.

    plans: of each mode that fits; ``auto`` has the winner's. rates: predicted samples/s by mode, fastest first.
    """

    plans: dict[str, Plan]
    rates: dict[str, float]

    @property
    def winner(self) -> str:
        """The mode that ``auto`` runs."""
        return next(iter(self.rates))


def measure_profile(workload: Workload, path: Path) -> None:
    """Measure the workload's modules on two cores at once, unless the file is there."""
    if path.exists():
        return
    config = load_config(workload.config_file(), [*COMMON, f"mode={AUTO}", CHOICES])
    report = flowtrain.profile(
        config, devices=DEVICES, trials=True, progress=lambda what: print(f"measuring {what}", file=sys.stderr)
    )
    path.write_text(report.profile.to_json(), encoding="utf-8")


def predict(workload: Workload, profile: Path) -> Predicted:
    """Plan ``auto`` and each mode by itself, all with the same choices."""

    def report_of(mode: str) -> PlanReport:
        overrides = [*COMMON, f"mode={mode}", f"allocator.profile={profile}", CHOICES]
        return flowtrain.plan(load_config(workload.config_file(), overrides), devices=DEVICES, profile=profile)

    auto = report_of(AUTO)
    rates = {each.mode: each.rate for each in auto.comparison.ratings if each.rate is not None}
    rates.pop("llm_only", None)
    plans = {AUTO: auto.plan} | {mode: report_of(mode).plan for mode in rates}
    return Predicted(plans, rates)


def stand_ins(workload: Workload, predicted: Predicted, variants: list[Variant]) -> dict[str, str]:
    """The run that shows each mode's plan: ``auto``, a variant that does the same anyway, or one of its own."""
    by_key = {}
    for variant in reversed(variants):
        by_key[_essentials(load_config(workload.config_file(), [*COMMON, *variant.overrides]))] = variant.name
    found = {}
    for mode in predicted.rates:
        config = load_config(workload.config_file(), COMMON, plan=predicted.plans[mode])
        found[mode] = AUTO if mode == predicted.winner else by_key.get(_essentials(config), f"{PLANNED}{mode}")
    return found


def _essentials(config: RunConfig) -> tuple[object, ...]:
    """What decides a run's speed; shares of cores and sizes of segments are resources alone."""
    encoder, backbone = config.encoders["vision"], config.backbone
    own_encoders = (encoder.data_parallel_size, encoder.tensor_parallel_size) if config.has_encoder_actors else ()
    return (
        config.mode,
        own_encoders if config.mode != "colocated" else (),
        (backbone.data_parallel_size, backbone.pipeline_parallel_size, backbone.tensor_parallel_size),
        backbone.activation_checkpointing,
        backbone.sharding if backbone.data_parallel_size > 1 else None,
        config.scheduler,
        config.pipeline,
        config.pool.exchange,
    )
