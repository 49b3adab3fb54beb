"""The files that audit a run, as a run of some steps leaves them."""

from __future__ import annotations

import json

from flowtrain.observability.ledger import LedgerRow, LedgerState, LedgerWriter
from flowtrain.observability.run_dir import RunDir


def write_audit(files: RunDir, num_steps: int, flush_every: int = 1) -> None:
    """Write metrics and ledger of steps 1 to ``num_steps``, with one position a step."""
    files.root.mkdir(parents=True, exist_ok=True)
    files.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, num_steps + 1)))
    ledger = LedgerWriter(files.ledger)
    for step in range(1, num_steps + 1):
        ledger.append([LedgerRow(step - 1, "data", step - 1, 0, step, 0, 0, LedgerState.CONSUMED)])
        if step % flush_every == 0:
            ledger.flush()
