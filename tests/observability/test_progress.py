from __future__ import annotations

import io
from typing import Any

from flowtrain.observability.callback import deliver
from flowtrain.observability.progress import ProgressDisplay, ProgressState
from flowtrain.types.metrics import PoolUse
from flowtrain.types.run_events import StepFinished
from tests.observability.events import NOTED, started


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that reports that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_says_one_line_every_few_seconds_and_the_last_step(make_metrics: Any) -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay("plain", total_steps=10, stream=stream, clock=clock) as display:
        for step in range(1, 9):
            clock.now_s += 2.0
            display.update(ProgressState(make_metrics(step), pool_bound_nbytes=4096))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 4/10", "step 7/10", "step 8/10"]
    assert lines[0] == (
        "step 1/10  ETA -  loss 1.0000  2,000 tokens/s  pool 25%  starved 25%  blocked 5%  quarantined 0"
    )


def test_an_evaluation_is_said_at_once(make_metrics: Any) -> None:
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay("auto", total_steps=10, stream=stream, clock=clock)
    display.update(ProgressState(make_metrics(1), 4096))
    display.update(ProgressState(make_metrics(2, eval_loss=1.25, rejected=3), 4096))
    line = stream.getvalue().splitlines()[1]
    assert "  eval 1.2500  " in line
    assert line.endswith("quarantined 3")


def test_the_blocked_share_is_a_mean_over_encoders(make_metrics: Any) -> None:
    state = ProgressState(make_metrics(1, step_time_s=2.0, blocked_s=3.0), 4096, num_encoders=3)
    assert state.blocked_share == 0.5


def test_off_shows_notes_alone(make_metrics: Any) -> None:
    stream = io.StringIO()
    with ProgressDisplay("off", total_steps=1, stream=stream) as display:
        display.update(ProgressState(make_metrics(1), 0))
        display.note("encoder-0 [restarted] after a crash")
    assert stream.getvalue() == "encoder-0 [restarted] after a crash\n"


def test_the_eta_counts_the_steps_of_this_start_without_the_starting_up(make_metrics: Any) -> None:
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay("plain", total_steps=1000, first_step=900, stream=stream, clock=clock)
    clock.now_s += 300.0  # starting up
    for step in (901, 911):
        display.update(ProgressState(make_metrics(step), 0))
        clock.now_s += 60.0
    assert "ETA 8:54" in stream.getvalue()


def test_phases_before_the_first_step_are_lines_of_a_log(make_metrics: Any) -> None:
    for mode, expected in (
        ("auto", ["loading ...", "waiting ..."]),
        ("plain", ["loading ...", "waiting ..."]),
        ("off", []),
    ):
        stream = io.StringIO()
        with ProgressDisplay(mode, stream=stream) as display:  # type: ignore[arg-type]
            display.phase("loading")
            display.expect(7)
            display.phase("waiting")
            assert stream.getvalue().splitlines() == expected
            display.update(ProgressState(make_metrics(3), 4096))
        assert ("step 3/7" in stream.getvalue()) == (mode != "off")


def test_phases_on_a_terminal_are_a_status_that_steps_replace(make_metrics: Any) -> None:
    stream = Terminal()
    with ProgressDisplay("auto", stream=stream) as display:
        display.phase("loading models")
        display.note("a note")
        display.phase("waiting for step 3")
        display.expect(4, first_step=2)
        assert "2/4" not in stream.getvalue()
        display.update(ProgressState(make_metrics(3), 4096))
        before = len(stream.getvalue())
        display.update(ProgressState(make_metrics(4), 4096))
    assert "loading models" in stream.getvalue()[:before] and "a note" in stream.getvalue()
    assert "waiting for step" not in stream.getvalue()[before:]


def test_on_a_terminal_the_display_is_live(make_metrics: Any) -> None:
    stream = Terminal()
    with ProgressDisplay("auto", total_steps=4, stream=stream) as display:
        display.update(ProgressState(make_metrics(3, eval_loss=0.5), 4096))
        display.note("a note")
        display.update(ProgressState(make_metrics(4), 4096))
    shown = stream.getvalue()
    assert "4/4" in shown and "a note" in shown and "eval 0.5000" in shown and "starved 25%" in shown


def test_as_a_callback_it_knows_encoders_pool_and_notes(make_metrics: Any) -> None:
    stream = io.StringIO()
    with ProgressDisplay("plain", total_steps=1, stream=stream) as display:
        deliver(display, NOTED)
        deliver(display, started(roles={"encoder": 4}))
        pool = (PoolUse("encoder", "0", "dram", 3, 2048), PoolUse("feeder", "0", "dram", 1, 2048))
        hbm = PoolUse("encoder", "0", "hbm", 9, 9)
        metrics = make_metrics(1, step_time_s=2.0, blocked_s=4.0, pool_dram_nbytes=1024, pool=(*pool, hbm))
        deliver(display, StepFinished(metrics=metrics))
    note, line = stream.getvalue().splitlines()
    assert note == "sharding: full"
    assert "pool 25%" in line and "blocked 50%" in line


def test_without_encoders_nothing_is_blocked(make_metrics: Any) -> None:
    stream = io.StringIO()
    with ProgressDisplay("plain", total_steps=1, stream=stream) as display:
        deliver(display, started(roles={"backbone": 1}))
        deliver(display, StepFinished(metrics=make_metrics(1)))
    assert "blocked" not in stream.getvalue()
