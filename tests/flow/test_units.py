from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.config.training import TrainingConfig
from flowtrain.flow.units import ends_step, eval_position_after, num_steps_of, unit_sequence
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE


def test_steps_and_evaluations_alternate_as_due() -> None:
    assert list(unit_sequence(5, 4, None, [EvalRounds(2, 3)])) == [
        Unit(0, UnitKind.TRAIN, 1, 0, 4),
        Unit(1, UnitKind.TRAIN, 2, 4, 4),
        Unit(2, UnitKind.EVAL, 2, EVAL_POSITION_BASE, 3),
        Unit(3, UnitKind.TRAIN, 3, 8, 4),
        Unit(4, UnitKind.TRAIN, 4, 12, 4),
        Unit(5, UnitKind.EVAL, 4, EVAL_POSITION_BASE + 3, 3),
        Unit(6, UnitKind.TRAIN, 5, 16, 4),
    ]


def test_sets_that_are_due_together_follow_each_other_and_empty_ones_are_left_out() -> None:
    evaluations = [EvalRounds(2, 3), EvalRounds(1, 0), EvalRounds(4, 2)]
    base = EVAL_POSITION_BASE
    assert [unit for unit in unit_sequence(4, 1, None, evaluations) if unit.kind is UnitKind.EVAL] == [
        Unit(2, UnitKind.EVAL, 2, base, 3, eval_set=0),
        Unit(5, UnitKind.EVAL, 4, base + 3, 3, eval_set=0),
        Unit(6, UnitKind.EVAL, 4, base + 6, 2, eval_set=2),
    ]


rounds = st.lists(st.builds(EvalRounds, st.integers(1, 6), st.integers(0, 4)), max_size=3)


@given(st.integers(1, 25), rounds)
def test_a_step_ends_with_its_last_evaluation(num_steps: int, evaluations: list[EvalRounds]) -> None:
    units = list(unit_sequence(num_steps, 1, None, evaluations))
    last = {unit.step: unit for unit in units}
    assert [unit for unit in units if ends_step(evaluations, unit)] == list(last.values())
    for step in range(num_steps + 1):
        later = [unit.first_position for unit in units if unit.kind is UnitKind.EVAL and unit.step > step]
        assert not later or eval_position_after(evaluations, step) == min(later)


@settings(deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(1, 7), rounds)
def test_resuming_gives_the_tail(
    data: st.DataObject, num_steps: int, batch: int, evaluations: list[EvalRounds]
) -> None:
    total = data.draw(st.one_of(st.none(), st.integers((num_steps - 1) * batch + 1, num_steps * batch)))
    units = list(unit_sequence(num_steps, batch, total, evaluations))
    assert [unit.index for unit in units] == list(range(len(units)))
    trained = [p for unit in units if unit.kind is UnitKind.TRAIN for p in unit.positions]
    assert trained == list(range(num_steps * batch if total is None else total))
    evaluated = [p for unit in units if unit.kind is UnitKind.EVAL for p in unit.positions]
    assert evaluated == list(range(EVAL_POSITION_BASE, EVAL_POSITION_BASE + len(evaluated)))
    for start in range(num_steps + 1):
        tail = list(unit_sequence(num_steps, batch, total, evaluations, start))
        assert tail == units[len(units) - len(tail) :]
        before = units[: len(units) - len(tail)]
        assert [u.step for u in before if u.kind is UnitKind.TRAIN] == list(range(1, start + 1))
        assert not tail or tail[0].kind is UnitKind.TRAIN  # a checkpoint waits for the round after its step


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"max_steps": 7}, (7, None)),
        ({"num_epochs": 1}, (3, 10)),
        ({"num_epochs": 2}, (5, 20)),
        ({"num_epochs": 0.45}, (1, 4)),
        ({"num_epochs": 0.001}, (1, 1)),
    ],
)
def test_number_of_steps(training: dict[str, float], expected: tuple[int, int | None]) -> None:
    config = TrainingConfig(global_batch_size=4, **training)
    assert num_steps_of(config, [6, 4]) == expected
