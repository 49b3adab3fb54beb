"""Predict a run from the sizes of its samples alone: the same StepPlans that its coordinator will produce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from math import isqrt

from flowtrain.config.run import RunConfig
from flowtrain.controller.pack import DEFAULT_STEPS, Progress, StepPrediction, Workload, first_steps
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.data.feed import Feed
from flowtrain.errors import ConfigError
from flowtrain.flow.units import unit_sequence
from flowtrain.models.families.registry import family_from_config
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.report import WorkloadStep
from flowtrain.scheduler.run_cost import configured_costs, first_cost
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.scheduler.summary import imbalance, packing_fill
from flowtrain.search.configured import configured_search, has_times
from flowtrain.search.pipetune import PipeTune
from flowtrain.types.plan import CostModel, StepPlan, Unit, UnitKind
from flowtrain.types.samples import Rejection, SizedSample

_LARGE_SIDE = 1 << 16
"""Side of a square image in pixels; every encoder scales an image of that size down. Larger than
``data.max_image_pixels`` none is encoded."""


@dataclass(frozen=True, slots=True)
class SizedUnit:
    """A training unit with the samples that it is planned from, and the rejected ones."""

    unit: Unit
    samples: tuple[SizedSample, ...]
    rejections: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The fewest and the most tokens of an image."""

    fewest: int
    most: int
    are_seen: bool = True
    """Whether images have them, of the first step's samples if they vary; else the encoder's own limits."""


def image_tokens(run_spec: RunSpec) -> dict[str, ImageTokens]:
    """Return the fewest and the most tokens of an image, by encoder.

    If they depend on an image's size, they are those of the first step's samples (a sample with several images counts
    with its mean), or the encoder's limits if none of them has an image and is accepted. Raises DataError if these
    samples cannot be read.
    """
    config = run_spec.config
    if config.mode == "llm_only":  # there samples have no images, but as many tokens
        config = config.model_copy(update={"mode": "decoupled"})
        run_spec = replace(run_spec, config=config)
    family = family_from_config(config)
    found: dict[str, ImageTokens] = {}
    largest = min(_LARGE_SIDE, isqrt(config.data.max_image_pixels))
    for name in config.encoders:
        fewest, most = (family.image_layout(name, side, side).num_tokens for side in (1, largest))
        found[name] = ImageTokens(fewest, most)
        if fewest < most:
            means = [
                round(sample.num_vision_tokens / len(sample.image_nbytes))
                for unit in sized_units(run_spec, 1)
                for sample in unit.samples
                for part in sample.parts
                if part.name == name and part.num_items
            ]
            found[name] = ImageTokens(min(means), max(means)) if means else ImageTokens(fewest, most, are_seen=False)
    return found


def sized_units(run_spec: RunSpec, num_steps: int | None = None) -> Iterator[SizedUnit]:
    """Yield a run's training units, of all steps or of the first ``num_steps``, sized as its feeder does."""
    units = unit_sequence(
        run_spec.num_steps,
        run_spec.config.training.global_batch_size,
        run_spec.total_positions,
        run_spec.evaluations,
    )
    training = (unit for unit in units if unit.kind is UnitKind.TRAIN)
    with closing(Feed.from_config(run_spec.config, run_spec.indexes)) as feed:
        for unit in islice(training, num_steps):
            share = feed.next_unit(unit)
            yield SizedUnit(unit, tuple(share.sized), tuple(share.rejections))


def run_workload(
    config: RunConfig, num_steps: int | None = None, compare: bool = False, progress: Progress | None = None
) -> Workload:
    """Size and plan a run's first steps: ``num_steps``, or ``DEFAULT_STEPS``, or as many as it has.

    compare: with the search of ``pipeline.policy: pipetune``, if it is possible, whatever the policy is.
    progress: called after each step whose samples are sized. Raises ConfigError or DataError if the run could not
    start; its pool is not checked.
    """
    is_auto, config = config.mode == "auto", config.settled
    run_spec = prepare(config, check_pool=False)
    search, notes = _search_of(run_spec, compare)
    if is_auto and search is not None:
        notes = (*notes, "mode is auto: steps are simulated with the given degrees, and a run's plan may choose others")
    planner = planner_of(run_spec)
    count = min(num_steps or DEFAULT_STEPS, run_spec.num_steps)
    steps: list[WorkloadStep] = []
    predictions: list[StepPrediction] = []
    rejected: Counter[str] = Counter()
    is_exact = config.data.order == "deterministic"
    for sized in sized_units(run_spec, count):
        sizes = planner.sizes_of(sized.samples)
        lengths = Lengths(sizes.tokens, sizes.vision_tokens)
        steps.append(WorkloadStep(lengths, planner.rules(sized.unit), sized.unit.num_positions, sizes))
        predictions.append(_prediction(planner.plan(sized.unit, sizes), is_exact))
        rejected.update(rejection.reason.value for rejection in sized.rejections)
        if progress is not None:
            progress("sizing samples", len(steps), count)
    return Workload(
        config=config,
        source=f"run {config.name}: {', '.join(run_spec.source_names)}",
        order=first_steps(count, run_spec.num_steps),
        vision_unit="vision tokens",
        steps=tuple(steps),
        predictions=tuple(predictions),
        rejected=dict(rejected),
        source_notes=notes,
        search=search,
        simulated_on=_simulated_on(search) if search is not None else "",
    )


def _search_of(run_spec: RunSpec, compare: bool) -> tuple[PipeTune | None, tuple[str, ...]]:
    """The search of a run, or the one that its methods are compared with; else why there is none, as a note."""
    config, model = run_spec.config, run_spec.model_spec
    if run_spec.search is not None or not compare:
        return run_spec.search, ()
    if config.data.grouping is not None:
        return None, (
            "data.grouping keeps its groups, so the policy pipetune, which packs anew, is not compared and no step is "
            "simulated",
        )
    if not has_times(config):
        return None, (
            "neither allocator.profile nor backbone.accelerator_type is given, so no step is simulated and the policy "
            "pipetune is not compared",
        )
    tuned = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"policy": "pipetune"})})
    try:
        return configured_search(tuned, model), ()
    except ConfigError as error:
        return None, (
            f"no step is simulated, and the policy pipetune is not compared, since its search is refused: {error}",
        )


def _simulated_on(search: PipeTune) -> str:
    """Which ranks a search simulates, and whose times they take."""
    times, degrees = search.simulator.times.times, search.simulator.times.degrees
    source = "data sheets" if times.profile is None else times.profile.source
    ranks = "1 rank" if degrees.world_size == 1 else f"{degrees.world_size} ranks"
    what = "" if search.simulator.encoder else "; the backbone alone, without encoders"
    placed = f"dp={degrees.dp} pp={degrees.pp} tp={degrees.tp}"
    return f"{ranks} ({placed}) on {times.device.name}, times from {source}{what}"


def run_cost(config: RunConfig) -> CostModel:
    """Return the cost model that plans a run's first step; its data are not read."""
    spec = family_from_config(config).model_spec
    return first_cost(config, spec, configured_costs(config, spec))


def planner_of(run_spec: RunSpec) -> StepPlanner:
    """Return the planner of a run, as its coordinator has it."""
    config, dp_size = run_spec.config, run_spec.plan.backbone.data_parallel_size
    return StepPlanner.from_config(config, dp_size, run_spec.cost, run_spec.search)


def _prediction(plan: StepPlan, is_exact: bool) -> StepPrediction:
    return StepPrediction(
        step=plan.unit.step,
        digest=plan.digest() if is_exact else None,
        num_microbatches=plan.num_microbatches,
        fill=packing_fill(plan),
        step_imbalance=imbalance(plan),
    )
