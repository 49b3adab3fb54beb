"""SIGINT and SIGTERM ask for an end, and only SIGTERM starts the time that its sender gives."""

from __future__ import annotations

import signal
import time

import pytest

from flowtrain.controller.signals import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_the_end_and_a_second_one_ends_at_once(number: signal.Signals) -> None:
    stop, before_s, handler = StopRequest(), time.monotonic(), signal.getsignal(signal.SIGINT)
    with stop_on_signals(stop):
        signal.raise_signal(number)
        assert stop.is_set()
        if number == signal.SIGTERM:
            assert stop.terminated_s is not None and stop.terminated_s >= before_s
        else:
            assert stop.terminated_s is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGINT) is handler
