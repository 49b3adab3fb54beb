"""Errors cross processes whole: their message, and what code decides by."""

from __future__ import annotations

import pickle

import pytest

from flowtrain.errors import ConfigError, Fault, FaultCode

FAULTS = (
    Fault("backbone.num_devices", FaultCode.DEGREES, "backbone.num_devices (0.5) is too little"),
    Fault("seed", FaultCode.VALUE, "seed = -1: must be at least 0"),
)


@pytest.mark.parametrize("error", [ConfigError("no file"), ConfigError("two errors", FAULTS)], ids=str)
def test_a_refusal_arrives_with_its_faults(error: ConfigError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        arrived = pickle.loads(pickle.dumps(error, protocol))
        assert type(arrived) is ConfigError and (str(arrived), arrived.faults) == (str(error), error.faults)


def test_a_refusal_of_one_fault_is_its_text() -> None:
    error = ConfigError.of(FAULTS[0].key, FAULTS[0].code, FAULTS[0].text)
    assert (str(error), error.faults) == (FAULTS[0].text, FAULTS[:1])
