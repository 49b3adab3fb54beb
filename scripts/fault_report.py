"""Write what fault campaigns have shown as a page.

python scripts/fault_report.py DIRECTORY ... --report FILE.md

Reads ``faults.jsonl`` of ``fault_campaign.py`` and ``hosts.jsonl`` of ``fault_hosts.py``: faults of runs that were
audited, as each campaign ends at the first audit that fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _report import machine
from fault_campaign import HEADINGS, Suffered, rows_of

from tests.e2e.disturbed import json_lines

FILES = {"faults.jsonl": "scripts/fault_campaign.py", "hosts.jsonl": "scripts/fault_hosts.py"}


def page_of(directories: list[Path]) -> Iterator[str]:
    """Yield the lines of the page."""
    found = machine()
    yield "# Faults"
    yield ""
    yield (
        f"What `scripts/fault_campaign.py` and `scripts/fault_hosts.py` did to small runs on {found['cpu']}, "
        f"{found['cores']} cores, which other work shared. After each run an audit from outside found its losses equal "
        "to those of the undisturbed run to the bit, each position of the data in the ledger once, and no process, "
        "shared memory or temporary file left. A table has the number of faults of each kind, what the run did, the "
        "median (and the most) seconds until it noticed and until it trained again, and the steps that it did twice "
        "(of as many faults as have this recorded)."
    )
    yield ""
    yield (
        "A run that *ended* was resumed by one command: a driver that is killed cannot do that itself, and Ray ends "
        "its drivers when its raylet is gone. Most of these runs were made before a first start that loses a process "
        "was tried again: ranks, coordinators and feeders that ended a run did so there. A process that is stopped "
        "in the last steps may have nothing left to do, so the run *went on without it*."
    )
    for name, script in FILES.items():
        lines = [line for directory in directories for line in records(directory / name)]
        if not lines:
            continue
        suffered = [Suffered(**line) for line in lines]
        yield ""
        yield f"## {len(suffered)} faults by `{script}`"
        yield ""
        yield f"| {' | '.join(HEADINGS)} |"
        yield f"| {' | '.join('---' for _ in HEADINGS)} |"
        yield from (f"| {' | '.join(row)} |" for row in rows_of(suffered))


def records(path: Path) -> list[dict[str, object]]:
    """Of a campaign; none if it was not run there."""
    return json_lines(path) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY")
    parser.add_argument("--report", type=Path, required=True, metavar="FILE.md")
    args = parser.parse_args()
    args.report.write_text("\n".join([*page_of(args.directories), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
