"""The runs that are compared: their configurations, and what is measured of each."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from _modes_actors import CountingBackboneRank, CountingEncoder, CountingFeeder
from _modes_data import ModelSetting
from _modes_watch import RunWatcher

from flowtrain.config.load import load_config
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.metrics import read_metrics
from flowtrain.types.run_plan import Plan

ENDING_STEPS = 4
"""Last steps of a run, not measured: the encoders have finished by then and leave their core to the backbone."""
DP2 = ("backbone.data_parallel_size=2",)
TWO_ENCODERS = ("encoders.vision.data_parallel_size=2",)
COMMON = (
    "checkpoint.every_steps=100000",
    "observability.progress=off",
    "observability.dashboard=false",
    "observability.trace.steps=0",
)
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Variant:
    """A mode or an ablation.

    ablation_of: the variant that has what this one lacks. settings_of: one whose best settings it has.
    """

    name: str
    overrides: tuple[str, ...]
    ablation_of: str | None = None
    settings_of: str | None = None


VARIANTS = (
    Variant("decoupled", ()),
    Variant("decoupled_2_encoders", TWO_ENCODERS, settings_of="decoupled"),
    Variant("decoupled_dp2", (*DP2, *TWO_ENCODERS), settings_of="decoupled"),
    Variant("colocated", ("mode=colocated", *DP2)),
    Variant("monolithic_dp2", ("mode=monolithic", *DP2)),
    Variant("monolithic_dp1", ("mode=monolithic",)),
    Variant("disaggregated", ("mode=disaggregated",), settings_of="decoupled"),
    Variant("llm_only", ("mode=llm_only",)),
    Variant("without_pool", ("pool.exchange=point_to_point",), "decoupled", "decoupled"),
    Variant(
        "without_scheduler",
        ("mode=colocated", *DP2, "scheduler.packing=sequential", "scheduler.dispatch=round_robin"),
        "colocated",
        "colocated",
    ),
)
ENCODE_BATCHES = tuple((f"encoders.vision.max_batch_patches={patches}",) for patches in (392, 784, 1568))
SEARCHED = {
    "decoupled": ENCODE_BATCHES,
    "colocated": ENCODE_BATCHES,
    "disaggregated": tuple((f"scheduler.lookahead_steps={steps}",) for steps in (1, 2, 3)),
    "monolithic_dp2": tuple((f"scheduler.packing={name}",) for name in ("best_fit_balanced", "balanced", "sequential")),
}
"""Settings of variants, of which the fastest is used, in the order in which they are searched."""


@dataclass(frozen=True)
class Measured:
    """Of one run's window.

    ended_s: time of each step's end, from the last one before the window on. tokens: of each step of the window.
    busy_s: processor seconds by role. copied: bytes. loss: of the run's first step.
    """

    ended_s: tuple[float, ...]
    tokens: tuple[int, ...]
    starved_s: float
    busy_s: dict[str, float]
    copied: int
    peak_nbytes: int
    fill: float
    losses: tuple[float, ...] = field(repr=False)

    @property
    def window_s(self) -> float:
        return self.ended_s[-1] - self.ended_s[0]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.window_s

    @property
    def starved_share(self) -> float:
        return self.starved_s / self.window_s

    @property
    def step_s(self) -> tuple[float, ...]:
        return tuple(end - start for start, end in zip(self.ended_s, self.ended_s[1:], strict=False))


@dataclass(frozen=True)
class Workload:
    """A model with the samples of one mix. counters: directory into which actors count."""

    setting: ModelSetting
    model: Path
    samples: Path
    scratch: Path
    counters: Path
    batch: int

    def config_file(self) -> Path:
        """The configuration that all variants change."""
        encoder = {**self.setting.encoder, "num_cpus": 0.5, "segment_nbytes": 64 << 20}
        document = {
            "name": "base",
            "runs_dir": str(self.scratch),
            "model": {"path": str(self.model)},
            "encoders": {"vision": encoder},
            "backbone": {"num_cpus": 0.5},
            "data": {
                "sources": [{"path": str(self.samples)}],
                "max_seq_len": self.setting.microbatch_tokens,
                "max_image_nbytes": 1 << 20,
                "shuffle": "none",
            },
            "training": {
                "global_batch_size": self.batch,
                "max_steps": self.setting.steps,
                "learning_rate": LEARNING_RATE,
                "lr_schedule": "constant",
                "max_grad_norm": 1.0,
            },
            "scheduler": {"microbatch_tokens": self.setting.microbatch_tokens},
        }
        path = self.scratch / "base.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def run(self, name: str, overrides: Sequence[str], steps: int | None = None, plan: Plan | None = None) -> Measured:
        """Train, and measure the steps between warm-up and ending.

        steps: None for as many as the setting has. plan: sets degrees and what else a planner chose.
        """
        num_steps = steps or self.setting.steps
        length = f"training.max_steps={num_steps}"
        config = load_config(self.config_file(), [f"name={name}", *COMMON, length, *overrides], plan=plan)
        metrics = self.scratch / name / "metrics.jsonl"
        first, last = self.setting.warm_up, num_steps - ENDING_STEPS
        classes = ActorClasses(encoder=CountingEncoder, feeder=CountingFeeder, backbone=CountingBackboneRank)
        gc.collect()
        with RunWatcher(metrics, self.counters, first, last) as watcher:
            run_training(config, classes=classes, plan=plan)
        seen, lines = watcher.result(), list(read_metrics(metrics))
        window = lines[first:last]
        return Measured(
            ended_s=tuple(line["timestamp"] for line in lines[first - 1 : last]),
            tokens=tuple(line["num_tokens"] for line in window),
            starved_s=sum(line["starved_s"] for line in window),
            busy_s=seen.busy_s,
            copied=seen.copied,
            peak_nbytes=seen.peak_nbytes,
            fill=sum(line["packing_fill"] for line in window) / len(window),
            losses=tuple(line["loss"] for line in lines),
        )
