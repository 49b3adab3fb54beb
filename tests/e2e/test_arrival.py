"""``data.order: arrival``: a killed and resumed run has trained every position once, as its ledger says."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from flowtrain.observability.ledger import read_ledger
from flowtrain.training.checkpoint_store import latest_complete, read_meta
from tests.e2e.disturbed import (
    BATCH,
    NUM_STEPS,
    OVERSIZED_ROWS,
    TRUNCATED_ROWS,
    config_of,
    json_lines,
    quarantined,
)
from tests.e2e.processes import driver

pytestmark = pytest.mark.e2e

WINDOW = 3


def test_a_killed_and_resumed_run_trains_every_position_once(world: Path) -> None:
    config = config_of(
        world,
        "arrival",
        "data.order=arrival",
        "data.eval=null",
        f"scheduler.lookahead_steps={WINDOW}",
        "encoders.vision.max_batch_patches=4",  # many small batches, which come back in any order
    )
    rng = random.Random(23)
    with driver(config, world / "arrival-killed.log") as victim:
        enough = rng.randint(6, 12)
        victim.wait_until(lambda: victim.num_steps >= enough, "some steps")
        time.sleep(rng.uniform(0.0, 0.2))
        victim.signal_group(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")
        last = latest_complete(victim.run.checkpoints)
        assert last is not None
        state = read_meta(last).state["sampler"]
        assert 0 <= state["next_position"] <= read_meta(last).step * BATCH and len(state["consumed"]) <= WINDOW * BATCH
        with driver(config, world / "arrival-resumed.log", "--resume") as resumed:
            assert resumed.wait() == 0, resumed.report("the resumed run failed")
            resumed.check_nothing_is_left()

    metrics = json_lines(resumed.run.metrics)
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    assert metrics[-1]["epoch"] == pytest.approx(NUM_STEPS * BATCH / 120)
    ledger = read_ledger(resumed.run.ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(NUM_STEPS * BATCH))
    assert all(abs(row["step"] - (1 + row["position"] // BATCH)) <= WINDOW for row in ledger)
    for line in metrics:
        consumed = [row for row in ledger if row["step"] == line["step"] and row["state"] == "consumed"]
        assert len(consumed) == line["num_samples"], "what the step trained is what its rows say"
    rejected = [(row["position"], row["row"]) for row in ledger if row["state"] == "rejected"]
    assert {row for _, row in rejected} == {*TRUNCATED_ROWS, *OVERSIZED_ROWS}
    assert [(line[0], line[2]) for line in quarantined(resumed.run)] == rejected, "each bad sample once"
    assert metrics[-1]["rejected"] == len(rejected)
