"""The run as a sequence of units: training steps, and evaluation rounds when they are due."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowtrain.config.training import TrainingConfig
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE

NO_UNIT = 1 << 62
"""An index after every unit's."""


def unit_sequence(
    num_steps: int,
    global_batch_size: int,
    total_positions: int | None,
    eval_every: int | None,
    num_eval: int,
    start_step: int = 0,
) -> Iterator[Unit]:
    """Yield the run's units after its first ``start_step`` steps.

    Step k trains positions [(k-1) * global_batch_size, k * global_batch_size). A resumed run gets the tail of the whole
    sequence, with the same indices. The evaluation after ``start_step`` is not in it: a checkpoint waits for that.

    num_steps: steps of the whole run.
    global_batch_size: positions of a step.
    total_positions: training ends at this position; None: no end.
    eval_every: steps between evaluation rounds; None: no evaluation.
    num_eval: samples of an evaluation round; 0: no evaluation.
    start_step: steps done before.
    """
    every = eval_every if eval_every and num_eval > 0 else None
    for step in range(start_step + 1, num_steps + 1):
        index = step - 1 + ((step - 1) // every if every else 0)  # earlier training units and earlier rounds
        yield _train_unit(index, step, global_batch_size, total_positions)
        if every and step % every == 0:
            first = EVAL_POSITION_BASE + (step // every - 1) * num_eval
            yield Unit(index + 1, UnitKind.EVAL, step, first, num_eval)


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
        settings.eval_every,
        settings.num_eval,
        start_step,
    )


def _train_unit(index: int, step: int, batch_size: int, total_positions: int | None) -> Unit:
    first = (step - 1) * batch_size
    end = first + batch_size if total_positions is None else min(first + batch_size, total_positions)
    assert first < end, f"step {step} lies after the last of {total_positions} positions"
    return Unit(index, UnitKind.TRAIN, step, first, end - first)
