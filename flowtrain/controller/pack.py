"""What packing does to a workload, by one method or by all of them; needs neither data nor torch itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flowtrain.config.run import RunConfig
from flowtrain.controller.state import MIN_SAMPLES_TO_JUDGE
from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.packing.registry import PACKERS
from flowtrain.scheduler.report import (
    PAPER,
    Method,
    MethodReport,
    StepFigures,
    StepSearch,
    WorkloadStep,
    step_figures,
)
from flowtrain.scheduler.run_cost import cost_label
from flowtrain.types.plan import CostModel

PACK_SCHEMA = 1
DEFAULT_STEPS = 50

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What a run's step will be, in figures that ``metrics.jsonl`` has too."""

    step: int
    digest: str | None
    """Its ``plan_digest``; None if no run has such a step."""
    num_microbatches: int
    fill: float
    """Its ``packing_fill``."""
    step_imbalance: float
    """Its ``dp_imbalance``."""


@dataclass(frozen=True, slots=True)
class TokenSpread:
    """How much the tokens of a step differ from step to step; it shows how well the order mixes long and short rows."""

    mean: float
    """Tokens of a step."""
    spread: float
    """Their standard deviation over the steps, over the mean."""
    spread_of_rows: float
    """What ``spread`` would be with ``data.shuffle: rows``: these samples, dealt to these steps in any order."""

    @classmethod
    def of(cls, steps: Sequence[IntArray]) -> TokenSpread | None:
        """Return the spread of steps, given the lengths of each step's samples.

        None for fewer than two steps, or without a sample.

        Steps may differ in their number of samples by rejected ones; what only that explains is no spread.
        """
        if len(steps) < 2:
            return None
        lengths, counts = np.concatenate(steps), np.array([len(step) for step in steps])
        if not len(lengths):
            return None
        sums = np.array([step.sum() for step in steps])
        beyond = sums - counts * lengths.mean()
        own = math.sqrt((beyond**2).sum() / (len(steps) - 1))
        of_rows = math.sqrt(counts.mean() * lengths.var(ddof=1)) if len(lengths) > 1 else 0.0
        mean = float(sums.mean())
        return cls(mean, own / mean, of_rows / mean)


@dataclass(frozen=True)
class Workload:
    """Steps whose sizes are known, at least one."""

    config: RunConfig
    source: str
    """Where the sizes come from."""
    order: str
    """Which steps these are, in words."""
    vision_unit: str
    """Unit of the encoder's work."""
    steps: tuple[WorkloadStep, ...]
    predictions: tuple[StepPrediction, ...] = ()
    """The same steps by their StepPlans; empty if there is no run."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Rejected samples of these steps, counted by reason."""
    source_notes: tuple[str, ...] = ()
    """What a reader must know about the source."""
    search: StepSearch | None = None
    """Of ``pipeline.policy: pipetune``; it also simulates the steps of every method."""
    simulated_on: str = ""
    """Which ranks it simulates, in words; empty without it."""

    @property
    def num_samples(self) -> int:
        """Samples of all steps, without rejected ones."""
        return sum(len(step.lengths) for step in self.steps)

    @property
    def num_tokens(self) -> int:
        """Their backbone tokens."""
        return sum(int(step.lengths.tokens.sum()) for step in self.steps)

    @property
    def token_spread(self) -> TokenSpread | None:
        """How even the whole steps are; None for fewer than two."""
        whole = self.steps[:-1] if self.num_of_partial else self.steps
        return TokenSpread.of([step.lengths.tokens for step in whole])

    @property
    def num_of_partial(self) -> int:
        """Samples of a last step that has fewer than the others, rejected ones too; 0 if it is whole."""
        last = self.steps[-1].num_positions
        return last if last < self.config.training.global_batch_size else 0

    @property
    def step_sizes(self) -> str:
        """How many samples the steps have, in words."""
        num_whole, batch = len(self.steps) - bool(self.num_of_partial), self.config.training.global_batch_size
        samples = "1 sample" if batch == 1 else f"{batch:,} samples"
        if not self.num_of_partial:
            return f"{samples} each"
        if not num_whole:
            return f"{self.num_of_partial:,} of {samples}"
        steps = "1 step" if num_whole == 1 else f"{num_whole:,} steps"
        return f"{steps} of {samples} and a last one of {self.num_of_partial:,}"

    @property
    def cost(self) -> CostModel:
        """The cost model that plans the steps and gives their figures."""
        return self.steps[0].rules.cost

    @property
    def cost_label(self) -> str:
        """Its name for readers."""
        return cost_label(self.config, self.cost)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know."""
        return (*self.source_notes, *_notes(self))


@dataclass(frozen=True)
class PackReport:
    """Figures of a workload by method, the configured one first."""

    workload: Workload
    methods: tuple[MethodReport, ...]

    @property
    def steps(self) -> tuple[StepPrediction, ...]:
        """The steps by the configured method."""
        if self.workload.predictions:
            return self.workload.predictions
        figures = enumerate(self.methods[0].steps, start=1)
        return tuple(StepPrediction(step, None, of.num_bins, of.fill, of.step_imbalance) for step, of in figures)

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        workload, config = self.workload, self.workload.config
        spread = workload.token_spread
        scheduler = ("packing", "dispatch", "num_buckets", "microbatch_tokens")
        return {
            "schema": PACK_SCHEMA,
            "source": workload.source,
            "order": workload.order,
            "notes": list(workload.notes),
            "settings": {
                "seed": config.seed,
                "dp_size": config.backbone.data_parallel_size,
                "global_batch_size": config.training.global_batch_size,
                "max_seq_len": config.data.max_seq_len,
                "oversized": config.data.oversized,
                "shuffle": config.data.shuffle,
                "shuffle_blocks": config.data.shuffle_blocks,
                "cost": workload.cost.name,
                "policy": config.pipeline.policy,
                **{key: getattr(config.step_scheduler, key) for key in scheduler},
            },
            "simulated_on": workload.simulated_on or None,
            "num_steps": len(workload.steps),
            "num_samples": workload.num_samples,
            "num_tokens": workload.num_tokens,
            "step_tokens": asdict(spread) if spread else None,
            "rejected": dict(workload.rejected),
            "vision_unit": workload.vision_unit,
            "steps": [asdict(step) for step in self.steps],
            "methods": [_method_record(report) for report in self.methods],
        }


def report_workload(workload: Workload, compare: bool = False, progress: Progress | None = None) -> PackReport:
    """Lay out every step by the configured method, or by all methods, and collect the figures."""
    config = workload.config
    methods, num_steps = methods_of(config, compare, workload.search is not None), len(workload.steps)
    reports = []
    for number, method in enumerate(methods):
        figures: list[StepFigures] = []
        for step in step_figures(method, config.scheduler.num_buckets, workload.steps, search=workload.search):
            figures.append(step)
            if progress is not None:
                progress("packing", number * num_steps + len(figures), len(methods) * num_steps)
        reports.append(MethodReport.of(method, figures))
    return PackReport(workload, tuple(reports))


def first_steps(count: int, all_steps: int) -> str:
    """Return which steps of a run are examined, in words."""
    if count == all_steps:
        return f"all {count:,} steps" if count > 1 else "the only step"
    return f"the first {count:,} of {all_steps:,} steps" if count > 1 else f"the first of {all_steps:,} steps"


def methods_of(config: RunConfig, compare: bool, can_search: bool) -> list[Method]:
    """Return the configured method; with ``compare`` also every packing with its dispatch, and the paper's pair.

    can_search: the search of ``pipeline.policy: pipetune`` is one of them.
    """
    scheduler = config.step_scheduler
    packed = Method(scheduler.packing, scheduler.dispatch)
    # As a run with that policy, whatever the policy is.
    searched = [Method(config.scheduler.packing, packed.dispatch, is_searched=True)] if can_search else []
    configured = searched if searched and config.pipeline.policy == "pipetune" else [packed]
    if not compare:
        return configured
    return list(dict.fromkeys([*configured, *(Method(name, packed.dispatch) for name in PACKERS), PAPER, *searched]))


def _notes(workload: Workload) -> Iterator[str]:
    config = workload.config
    if workload.cost_label != config.scheduler.cost:
        yield (
            f"scheduler.cost is {config.scheduler.cost} and no scheduler.cost_profile is given: such a run starts with "
            f"{workload.cost.name}, which these steps are planned with, and then fits its own costs"
        )
    if config.data.order == "arrival":
        yield (
            "data.order is arrival: the run builds its steps from the samples that are ready, so these steps, in the "
            "order of positions, show how samples pack but do not predict the run's steps"
        )
    num_rejected = sum(workload.rejected.values())
    num_seen, most = workload.num_samples + num_rejected, config.data.max_rejected_fraction
    if num_seen >= MIN_SAMPLES_TO_JUDGE and num_rejected > most * num_seen:
        yield (
            f"rejected: {num_rejected:,} of {num_seen:,} samples ({100 * num_rejected / num_seen:.3g}%), more than "
            f"data.max_rejected_fraction ({100 * most:.3g}%) allows: a run would end"
        )
    if config.backbone.data_parallel_size == 1:
        yield "a single rank waits for no other: imbalances need more than one data-parallel rank, try --dp N"


def _method_record(report: MethodReport) -> dict[str, Any]:
    record = asdict(report)
    del record["steps"], record["method"]
    return {"label": report.method.label, **asdict(report.method), **record}
