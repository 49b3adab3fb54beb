"""Peak memory of a training step on four ranks against its prediction, for each way to save memory.

python benchmarks/memory.py [--json]

Ranks are processes of one gloo group; a small model trains two steps in bfloat16. Bytes of tensors are counted after
every operator, so the figures depend on torch alone, not on the machine or its load. Not counted: what an operator
needs for itself, and buffers of the communication library. The target is a prediction within 10 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from _report import Figure, at_most, emit
from shared.step_memory import CASES, Case, Measured, measure

TARGET_ERROR = 0.10
MIB = 2**20


def figures_of(case: Case, ranks: list[Measured]) -> Iterator[Figure]:
    """The fullest rank's bytes, and how far the prediction is off."""
    predicted = case.predicted()
    device, host = max(each.device for each in ranks), max(each.host for each in ranks)
    yield Figure(f"{case.name}/measured", device / MIB, "MiB")
    yield Figure(f"{case.name}/predicted", predicted.peak / MIB, "MiB")
    yield at_most(f"{case.name}/error", abs(predicted.peak / device - 1.0), "1", TARGET_ERROR)
    if host:
        yield Figure(f"{case.name}/host measured", host / MIB, "MiB")
        yield Figure(f"{case.name}/host predicted", predicted.host / MIB, "MiB")
        yield at_most(f"{case.name}/host error", abs(predicted.host / host - 1.0), "1", TARGET_ERROR)


def main() -> None:
    """Measure all cases and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    measured = measure(list(CASES.values()))
    emit("memory", [figure for name, case in CASES.items() for figure in figures_of(case, measured[name])], args.json)


if __name__ == "__main__":
    main()
