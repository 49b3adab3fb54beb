"""Times the default planner, from the samples' sizes to a finished StepPlan, and checks its plans."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import numpy as np
import torch
from _contenders import DEFAULT, DP_SIZE, Outcome, WrongResult, rules_of
from _lengths import STEP_SAMPLES, Workload
from _report import Figure, at_most

from flowtrain.config.flow import PoolConfig
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.scheduler.summary import slot_costs, step_imbalance
from flowtrain.training.batch import SampleArrays, build_batch
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from flowtrain.types.samples import TEXT_PART, PartSize, SampleRef, SizedSample

ENCODER = "vision"
PATCHES_PER_IMAGE = 1024
"""Of a tile of the traces, 448 pixels square in patches of 14; the mixtures' images would have 576."""
BATCH_PATCHES = 32 * PATCHES_PER_IMAGE
FEATURE_NBYTES = 2 * 1152
MEDIAN_TARGETS_MS = {8192: 0.4, 32768: 0.2}
P99_TARGETS_MS = {8192: 1.0}


@dataclass(frozen=True)
class SizedStep:
    """A unit and its samples' sizes, as the flow keeps them."""

    unit: Unit
    samples: tuple[SizedSample, ...]


@dataclass(frozen=True)
class Times:
    """Milliseconds over many plans."""

    median: float
    p99: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, values: np.ndarray) -> Times:
        """Build from the time of each plan."""
        return cls(*(float(np.percentile(values, share)) for share in (50, 99, 0, 100)))


@dataclass(frozen=True)
class PlanTime:
    """Wall time and processor time of plans, and garbage collections during them.

    Both times are from the lengths as numbers (``StepPlanner.sizes_of``) to a finished plan. with_reading_ms: wall time
    that includes reading these numbers from 256 ``SizedSample`` objects.
    """

    num_plans: int
    wall_ms: Times
    busy_ms: Times
    with_reading_ms: Times
    num_collections: int
    num_full_collections: int


def sized(workload: Workload) -> list[SizedStep]:
    """The steps of a workload as units that follow each other."""
    steps, position = [], 0
    for index, lengths in enumerate(workload.steps):
        samples = _samples(lengths, position, workload.tokens_per_image)
        steps.append(SizedStep(Unit(index, UnitKind.TRAIN, index + 1, position, len(samples)), samples))
        position += len(samples)
    return steps


def _samples(lengths: Lengths, first: int, tokens_per_image: int) -> tuple[SizedSample, ...]:
    samples = []
    for position, (tokens, images) in enumerate(
        zip(lengths.tokens.tolist(), lengths.vision.tolist(), strict=True), first
    ):
        parts = [PartSize(TEXT_PART, 1, 0, tokens, 2 * 4 * tokens)]
        vision = min(images * tokens_per_image, tokens - 1)
        if images:
            parts.append(PartSize(ENCODER, images, images * PATCHES_PER_IMAGE, vision, vision * FEATURE_NBYTES))
        samples.append(SizedSample(SampleRef(position, 0, position, 0), tokens, vision, tokens - vision, tuple(parts)))
    return tuple(samples)


def make_planner(capacity: int) -> StepPlanner:
    """The planner of a run with the default methods, compiled."""
    planner = StepPlanner(
        DP_SIZE,
        capacity,
        DEFAULT.packing,
        rules_of(capacity).cost,
        DEFAULT.num_buckets,
        DEFAULT.dispatch,
        {ENCODER: BATCH_PATCHES},
        PoolConfig().alignment,
    )
    planner.warm_up()
    return planner


def time_plans(workload: Workload, num_plans: int) -> PlanTime:
    """Plan the workload's steps in turn, one at a time as in a run, with the garbage collector on."""
    planner, steps = make_planner(workload.capacity), sized(workload)
    steps = [step for step in steps if len(step.samples) == STEP_SAMPLES] or steps
    columns = [planner.sizes_of(step.samples) for step in steps]
    for step in steps[:20]:
        planner.plan(step.unit, step.samples)
    wall, busy, with_reading = np.empty((3, num_plans))
    before = _collections()
    for number in range(num_plans):
        step = steps[number % len(steps)]
        wall_started, busy_started = time.perf_counter_ns(), time.thread_time_ns()
        planner.plan(step.unit, columns[number % len(steps)])
        busy[number] = time.thread_time_ns() - busy_started
        wall[number] = time.perf_counter_ns() - wall_started
        started = time.perf_counter_ns()
        planner.plan(step.unit, step.samples)
        with_reading[number] = time.perf_counter_ns() - started
    runs = np.subtract(_collections(), before)
    times = (Times.of(values / 1e6) for values in (wall, busy, with_reading))
    return PlanTime(num_plans, *times, num_collections=int(runs.sum()), num_full_collections=int(runs[2]))


def plan_time_figures(workload: Workload, timed: PlanTime) -> list[Figure]:
    """Wall times against their targets, and processor times."""
    note = f"{timed.num_plans} plans, {timed.wall_ms.fastest:.3f} to {timed.wall_ms.slowest:.3f}"
    name = f"{workload.label}.plan_time"
    return [
        _figure(workload, f"{name}_median", timed.wall_ms.median, MEDIAN_TARGETS_MS, note),
        _figure(workload, f"{name}_p99", timed.wall_ms.p99, P99_TARGETS_MS, f"processor time {timed.busy_ms.p99:.3f}"),
        Figure(f"{name}_processor_median", timed.busy_ms.median, "ms"),
        Figure(f"{name}_processor_p99", timed.busy_ms.p99, "ms"),
        Figure(f"{name}_with_reading_median", timed.with_reading_ms.median, "ms"),
    ]


def _figure(workload: Workload, name: str, value: float, targets: dict[int, float], note: str) -> Figure:
    target = targets.get(workload.capacity) if workload.is_trace else None
    return Figure(name, value, "ms", note=note) if target is None else at_most(name, value, "ms", target, note)


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def count_tokens(workload: Workload, default: Outcome) -> tuple[int, int]:
    """Check every step's plan; returns the samples' tokens and the tokens that the backbone computes.

    The first step's batches are built as the backbone builds them. default: the default method's outcome on this
    workload; the plans must have the same figures. Raises WrongResult.
    """
    planner, steps = make_planner(workload.capacity), sized(workload)
    tokens = computed = 0
    for step, figures in zip(steps, default.report.steps, strict=True):
        plan = planner.plan(step.unit, step.samples)
        what = f"{workload.label}, unit {step.unit.index}"
        _check_plan(what, workload.capacity, step, plan)
        if not np.isclose(step_imbalance(slot_costs(plan)), figures.step_imbalance, rtol=0, atol=1e-12):
            raise WrongResult(f"{what}: the plan differs from the layout whose figures are reported")
        tokens += plan.num_tokens
        planned = sum(max(1, microbatch.num_tokens) for slot in plan.slots for microbatch in slot)
        if step is steps[0] and (built := _built_tokens(plan)) != planned:
            raise WrongResult(f"{what}: the backbone's batches have {built} tokens where the plan has {planned}")
        computed += planned
    return tokens, computed


def _check_plan(what: str, capacity: int, step: SizedStep, plan: StepPlan) -> None:
    if sorted(plan.positions) != [sample.position for sample in step.samples]:
        raise WrongResult(f"{what}: of {len(step.samples)} samples some are in no microbatch or in two")
    size_of = {sample.position: sample.num_tokens for sample in step.samples}
    if plan.lengths != tuple(size_of[position] for position in plan.positions):
        raise WrongResult(f"{what}: a sample's length changed")
    fullest = max(microbatch.num_tokens for slot in plan.slots for microbatch in slot)
    if fullest > capacity or plan.num_microbatches % DP_SIZE:
        raise WrongResult(f"{what}: {plan.num_microbatches} microbatches of at most {fullest} tokens")


def _built_tokens(plan: StepPlan) -> int:
    """Tokens in a plan's microbatches as the backbone gets them: the size of its input."""
    total = 0
    for microbatch in (microbatch for slot in plan.slots for microbatch in slot):
        texts = [np.zeros((2, sample.num_tokens), dtype=np.int32) for sample in microbatch.samples]
        batch = build_batch(
            [SampleArrays(number, text, None) for number, text in enumerate(texts)],
            image_token_id=-1,
            feature_dim=1,
            dtype=torch.float32,
            loss_normalization="token",
            device=torch.device("cpu"),
        )
        total += batch.input_ids.numel()
    return total
