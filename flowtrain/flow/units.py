"""The run as a sequence of units: training steps, and evaluation rounds where they are due."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowtrain.config.training import TrainingConfig
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE

NO_UNIT = 1 << 62
"""Index that no unit has: it lies after the last one."""


def unit_sequence(
    num_steps: int,
    global_batch_size: int,
    total_positions: int | None,
    eval_every: int | None,
    num_eval: int,
    start_step: int = 0,
) -> Iterator[Unit]:
    """Yield the run's units from where ``start_step`` steps are done.

    Step k trains positions [(k-1) * global_batch_size, k * global_batch_size), cut at ``total_positions`` (None: no
    end). After every ``eval_every``-th step comes a round over ``num_eval`` samples (None or 0: no evaluation).
    The units of a resumed run are the same as the tail of the whole sequence, indices included; the evaluation after
    ``start_step`` is not among them, since a checkpoint waits for it.
    """
    every = eval_every if eval_every and num_eval > 0 else None
    for step in range(start_step + 1, num_steps + 1):
        index = step - 1 + ((step - 1) // every if every else 0)  # training units before, and rounds before
        yield _train_unit(index, step, global_batch_size, total_positions)
        if every and step % every == 0:
            first = EVAL_POSITION_BASE + (step // every - 1) * num_eval
            yield Unit(index + 1, UnitKind.EVAL, step, first, num_eval)


def units_left(settings: FlowSettings) -> Iterator[Unit]:
    """Yield the units that a run still has."""
    return _units(settings, settings.start_step, settings.num_steps)


def leftover_units(settings: FlowSettings) -> Iterator[Unit]:
    """Yield the training units that are done, from the first of whose own positions some are left (``arrival``)."""
    first_step = 1 + settings.sampler_state.next_position // settings.global_batch_size
    return (u for u in _units(settings, first_step - 1, settings.start_step) if u.kind is UnitKind.TRAIN)


def first_unit(settings: FlowSettings) -> int:
    """Return the index of the first unit that runs; ``NO_UNIT`` if no step is left."""
    first = next(units_left(settings), None)
    return first.index if first is not None else NO_UNIT


def num_steps_of(config: TrainingConfig, sizes: Sequence[int]) -> tuple[int, int | None]:
    """Return (steps of the run, positions of the run or None where ``max_steps`` alone ends it).

    An epoch is as many positions as the sources have rows together; the last step may be a partial one.
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
