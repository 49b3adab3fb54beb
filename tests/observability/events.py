"""Events of a small run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain.types.run_events import (
    ActorLost,
    CheckpointFinished,
    EvaluationFinished,
    GeneratedSample,
    Noted,
    Quarantined,
    Restarted,
    RunEnded,
    RunStarted,
)

T0 = 1_700_000_000.0
GENERATED = GeneratedSample("cats", 3, "what is <b>this</b>?", "a cat", "a **dog**", ("generated/2/cat.png",))
EVALUATED = EvaluationFinished(
    step=2,
    name="held-out",
    loss=0.5,
    num_samples=4,
    num_target_tokens=9,
    duration_s=1.5,
    generated=(GENERATED,),
    timestamp=T0,
)
CHECKPOINT = CheckpointFinished(step=2, duration_s=0.25, nbytes=1000, timestamp=T0)
LOST = ActorLost(step=2, role="encoder", name="encoder-1", reason="silent", hung_s=9.0, timestamp=T0)
RESTARTED = Restarted(step=2, role="encoder", name="encoder-1", reason="killed", timestamp=T0)
QUARANTINED = Quarantined(
    step=2, num_rejected=3, position=17, source="cats", row=5, reason="corrupt_image", timestamp=T0
)
NOTED = Noted(step=0, level="info", text="sharding: full", timestamp=T0)
ENDED = RunEnded(step=4, outcome="stopped", reason="on request", duration_s=60.0, timestamp=T0)


def started(directory: Path = Path("/runs/small"), **changes: Any) -> RunStarted:
    values: dict[str, Any] = {
        "step": 0,
        "run": "small",
        "mode": "decoupled",
        "num_steps": 4,
        "resumed_from": None,
        "roles": {"coordinator": 1, "encoder": 2, "feeder": 1, "backbone": 1},
        "device": "cpu",
        "versions": {"flowtrain": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"},
        "directory": str(directory),
        "config": {"name": "small"},
        "timestamp": T0,
    }
    return RunStarted(**(values | changes))
