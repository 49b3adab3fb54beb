"""What a run would do, without starting anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.run_memory import RunMemory, memory_of_run
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned_run import workload_of
from flowtrain.controller.planning.report import PlanReport
from flowtrain.controller.predict import ImageTokens, SizedUnit, image_tokens, sized_units
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.controller.resume import Resumption, foresee_resume
from flowtrain.types.run_plan import Plan

_MAX_DETAIL = 200
"""Characters of a rejection's detail: it may quote a thousand of the data, and a warning has one for each reason."""


@dataclass(frozen=True)
class DryRunReport:
    """What a run would be."""

    run: RunSpec
    """Its configuration, plan, steps, data and model."""
    image_tokens: dict[str, ImageTokens]
    """By encoder: see ``predict.image_tokens``."""
    memory: RunMemory | None = None
    """Predicted for some of the data's samples; None if all of them are rejected."""
    resumption: Resumption | None = None
    """The step that a resume would go on from, and what changed; None if no resume was asked for."""
    planning: PlanReport | None = None
    """The plan that ``mode: auto`` made; None if there was nothing to choose."""
    warnings: tuple[str, ...] = ()
    """What may go wrong in the run, as samples that it would reject."""


def foresee_run(config: RunConfig, resume: bool = False, plan: Plan | None = None) -> DryRunReport:
    """Look at data, model headers and checkpoints as a run would; raises the same ConfigError or DataError.

    plan: the plan that the configuration has its degrees from; None: they are its own.
    """
    run_spec = prepare(config, plan=plan)
    resumption = foresee_resume(run_spec) if resume else None
    units = _few_units(run_spec)
    return DryRunReport(
        run_spec,
        image_tokens(run_spec),
        _memory_of(run_spec, units),
        resumption,
        warnings=tuple(rejection_warnings(units, config.data.max_rejected_fraction)),
    )


def foresee_memory(run_spec: RunSpec) -> RunMemory | None:
    """Predict the memory of each rank and encoder, for samples like those in one block of each source."""
    return _memory_of(run_spec, _few_units(run_spec))


def rejection_warnings(units: Sequence[SizedUnit], max_rejected_fraction: float) -> Iterator[str]:
    """Yield, in words, how many of these units' samples are rejected, and for what reasons; nothing if none is."""
    rejections = [rejection for unit in units for rejection in unit.rejections]
    if not rejections:
        return
    count = len(rejections) + sum(len(unit.samples) for unit in units)
    by_reason = Counter(rejection.reason.value for rejection in rejections)
    first = {rejection.reason.value: _shortened(rejection.detail) for rejection in reversed(rejections)}
    reasons = "; ".join(f"{number:,} {reason} ({first[reason]})" for reason, number in by_reason.most_common())
    share = len(rejections) / count
    allowed = "more than" if share > max_rejected_fraction else "within what"
    yield (
        f"{len(rejections):,} of the {count:,} samples that were looked at ({100 * share:.3g}%) are rejected, "
        f"{allowed} data.max_rejected_fraction ({100 * max_rejected_fraction:.3g}%) allows: {reasons}; "
        "`flowtrain data check` lists all such rows"
    )


def _shortened(detail: str) -> str:
    return detail if len(detail) <= _MAX_DETAIL else f"{detail[: _MAX_DETAIL - 3]}..."


def _few_units(run_spec: RunSpec) -> list[SizedUnit]:
    """Size a step of samples out of one block of each source."""
    config = run_spec.config
    # A step's own samples would be in as many blocks as are open at a time.
    data = config.data.model_copy(update={"shuffle": "blocks", "shuffle_blocks": 1})
    return list(sized_units(replace(run_spec, config=config.model_copy(update={"data": data})), 1))


def _memory_of(run_spec: RunSpec, units: Sequence[SizedUnit]) -> RunMemory | None:
    config, samples = run_spec.config, [sample for unit in units for sample in unit.samples]
    if not samples:
        return None
    on_cpu = config.model.device == "cpu"
    return memory_of_run(config, run_spec.model_spec, workload_of(config, samples), on_cpu=on_cpu)
