"""Wire types that travel by the hundred: they arrive as they were sent, and nobody can change them."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent
from flowtrain.types.messages import PartLocation, PartReady
from flowtrain.types.samples import PartSize, SampleRef, SizedSample

REF = SampleRef(7, 1, 70, 2)
EXTENTS = (Extent(1 << 60, 100), Extent((1 << 60) + 4096, 28))
MESSAGES = (
    REF,
    EXTENTS[0],
    PartSize("vision", 2, 98, 98, 128),
    SizedSample(REF, 110, 98, 5, (PartSize("text", 1, 0, 110, 880), PartSize("vision", 2, 98, 98, 128))),
    PartReady(7, "vision", 3, EXTENTS),
    PartLocation(7, "vision", EXTENTS),
    LedgerRow(7, 1, 70, 2, 4, 0, 1, "consumed"),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        arrived = pickle.loads(pickle.dumps(message, protocol))
        assert arrived == message and type(arrived) is type(message) and hash(arrived) == hash(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_a_frozen_dataclass_with_slots(message: object) -> None:
    first = fields(message)[0].name  # type: ignore[arg-type]
    assert not hasattr(message, "__dict__")
    with pytest.raises(FrozenInstanceError):
        setattr(message, first, 0)
    assert replace(message, **{first: getattr(message, first)}) == message  # type: ignore[type-var]
