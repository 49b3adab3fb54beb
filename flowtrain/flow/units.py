"""The run as a sequence of units: training steps, and evaluation rounds when they are due."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowtrain.config.training import TrainingConfig
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE

NO_UNIT = 1 << 62
"""An index after every unit's."""


def unit_sequence(
    num_steps: int,
    global_batch_size: int,
    total_positions: int | None,
    evaluations: Sequence[EvalRounds] = (),
    start_step: int = 0,
) -> Iterator[Unit]:
    """Yield the run's units after its first ``start_step`` steps.

    Step k trains positions [(k-1) * global_batch_size, k * global_batch_size). A resumed run gets the tail of the whole
    sequence, with the same indices. The evaluations after ``start_step`` are not in it: a checkpoint waits for them.

    num_steps: steps of the whole run.
    global_batch_size: positions of a step.
    total_positions: training ends at this position; None: no end.
    evaluations: of each held-out set. Sets that are due after the same step follow each other in this order.
    start_step: steps done before.
    """
    for step in range(start_step + 1, num_steps + 1):
        index = step - 1 + sum((step - 1) // each.every for each in evaluations if each.num_samples)
        yield _train_unit(index, step, global_batch_size, total_positions)
        first = eval_position_after(evaluations, step - 1)
        for number in sets_due(evaluations, step):
            index, count = index + 1, evaluations[number].num_samples
            yield Unit(index, UnitKind.EVAL, step, first, count, eval_set=number)
            first += count


def sets_due(evaluations: Sequence[EvalRounds], step: int) -> list[int]:
    """Return the numbers of the held-out sets that are evaluated after a step."""
    return [number for number, each in enumerate(evaluations) if each.num_samples and step % each.every == 0]


def eval_position_after(evaluations: Sequence[EvalRounds], step: int) -> int:
    """Return the first evaluation position after the first ``step`` steps and their evaluations."""
    return EVAL_POSITION_BASE + sum(step // each.every * each.num_samples for each in evaluations)


def ends_step(evaluations: Sequence[EvalRounds], unit: Unit) -> bool:
    """Whether a unit is the last one of its step: no evaluation follows it."""
    due = sets_due(evaluations, unit.step)
    return not due or (unit.kind is UnitKind.EVAL and unit.eval_set == due[-1])


def units_left(settings: FlowSettings) -> Iterator[Unit]:
    """Yield the units that a run has left."""
    return _units(settings, settings.start_step, settings.num_steps)


def leftover_units(settings: FlowSettings) -> Iterator[Unit]:
    """Yield the done training units from the first one that has unconsumed positions (``arrival`` order)."""
    first_step = 1 + settings.sampler_state.next_position // settings.global_batch_size
    return (u for u in _units(settings, first_step - 1, settings.start_step) if u.kind is UnitKind.TRAIN)


def first_unit(settings: FlowSettings) -> int:
    """Return the index of the first unit that runs; ``NO_UNIT`` without steps left."""
    first = next(units_left(settings), None)
    return first.index if first is not None else NO_UNIT


def num_steps_of(config: TrainingConfig, sizes: Sequence[int]) -> tuple[int, int | None]:
    """Return (steps of the run, positions of the run or None if ``max_steps`` alone ends it).

    An epoch has one position per row of all sources. The last step may be a partial one.
    """
    if config.max_steps is not None:
        return config.max_steps, None
    assert config.num_epochs is not None
    total_positions = max(1, round(config.num_epochs * sum(sizes)))
    return math.ceil(total_positions / config.global_batch_size), total_positions


def _units(settings: FlowSettings, start_step: int, num_steps: int) -> Iterator[Unit]:
    return unit_sequence(
        num_steps,
        settings.global_batch_size,
        settings.total_positions,
        settings.evaluations,
        start_step,
    )


def _train_unit(index: int, step: int, batch_size: int, total_positions: int | None) -> Unit:
    first = (step - 1) * batch_size
    end = first + batch_size if total_positions is None else min(first + batch_size, total_positions)
    assert first < end, f"step {step} lies after the last of {total_positions} positions"
    return Unit(index, UnitKind.TRAIN, step, first, end - first)
