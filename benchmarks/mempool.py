"""The memory pool against a plain copy and Ray's object store: put in one process, get and touch in another.

python benchmarks/mempool.py [--rounds N] [--no-network] [--json]

Each round runs a block of each kind, so that all kinds meet the same noise. Writer and reader are warm Ray actors; the
store and the segment are touched once from end to end before anything is timed. Times are of the writer's and the
reader's call alone; touching the bytes and the message to the reader are the same for all and are reported separately.
Then the same between two hosts, network namespaces joined by veth, if this machine allows them (``_network.py``).
Exits with 1 if the reader sees other bytes than were written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from statistics import median

import numpy as np
import ray
from _handover import ROTATED_NBYTES, RUN_ID, SEGMENT_NBYTES, Reader, Seen, Writer, Written, rotation
from _network import network_figures
from _report import Figure, at_least, at_most, emit
from ray.actor import ActorHandle

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PUT_TARGET = 0.9
PAIR_TARGETS = {64 * KIB: 30.0, MIB: 4.0, 4 * MIB: 1.8, 16 * MIB: 1.0, 64 * MIB: 1.0}
IN_PLACE_US = 20.0
IN_PLACE_TARGET = 30.0
GET_US = 30.0
BLOCK_NBYTES = 32 * MIB
MAX_BLOCK = 32
WARM_UP_ROUNDS = 2
WAYS = (("put", "get", ""), ("write_in_place", "get", "in_place_"), ("put_in_ray", "get_from_ray", "ray_"))
"""The writer's method, the reader's method, and the name in the figures."""
HANDED_OVER = ("put", "get", "tensor")
"""The timed parts of a hand-over until the reader has a tensor."""

Rounds = defaultdict[str, list[list[float]]]
"""By what was timed, and by round: seconds of each call."""


def label(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"


class Handovers:
    """The two processes, and their timed calls for one size."""

    def __init__(self) -> None:
        self._writer: ActorHandle = ray.remote(num_cpus=0)(Writer).remote(RUN_ID)
        export = ray.get(self._writer.export.remote(), timeout=60)
        self._reader: ActorHandle = ray.remote(num_cpus=0)(Reader).remote(RUN_ID, export)

    def touch_everything(self) -> None:
        """Write and read all that the store and the segment can hold, once."""
        nbytes = SIZES[-1]
        self._start(nbytes)
        for way, back, _ in WAYS:
            for _ in range(2 * SEGMENT_NBYTES // nbytes):
                self._hand_over(way, back, 1)

    def measure(self, nbytes: int, rounds: int) -> Rounds:
        """Times of all ways for payloads of one size."""
        self._start(nbytes)
        count = max(1, min(MAX_BLOCK, BLOCK_NBYTES // nbytes))
        warm_up = max(WARM_UP_ROUNDS, -(-rotation(nbytes) // count))
        times: Rounds = defaultdict(list)
        for number in range(-warm_up, rounds):
            found = self._round(count)
            if number >= 0:
                for name, seconds in found.items():
                    times[name].append(seconds)
        return times

    def message_us(self, count: int = 200) -> list[float]:
        """Microseconds from sending the reader an address until its answer arrives."""
        self._start(SIZES[0])
        (place,) = ray.get(self._writer.put.remote(1), timeout=60).places
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            ray.get(self._reader.hear.remote(place), timeout=60)
            seconds.append(time.perf_counter() - started)
        return [1e6 * value for value in seconds]

    def _round(self, count: int) -> dict[str, list[float]]:
        found = {"copy": ray.get(self._writer.copy.remote(count), timeout=60).seconds}
        for way, back, prefix in WAYS:
            written, seen = self._hand_over(way, back, count)
            found |= {
                f"{prefix}put": written.seconds,
                f"{prefix}get": seen.get_seconds,
                f"{prefix}tensor": seen.tensor_seconds,
                f"{prefix}touch": seen.touch_seconds,
            }
        return found

    def _hand_over(self, way: str, back: str, count: int) -> tuple[Written, Seen]:
        written: Written = ray.get(getattr(self._writer, way).remote(count), timeout=60)
        seen: Seen = ray.get(getattr(self._reader, back).remote(written.places), timeout=60)
        if seen.sums != written.sums:
            sys.exit(f"{way}: the reader saw other bytes than were written")
        return written, seen

    def _start(self, nbytes: int) -> None:
        ray.get(self._writer.start.remote(nbytes), timeout=60)


def percentile_us(rounds: list[list[float]], percent: float) -> float:
    return 1e6 * float(np.percentile(np.concatenate(rounds), percent))


def ratio(rounds: Rounds, above: tuple[str, ...], below: tuple[str, ...]) -> tuple[float, str]:
    """Median over rounds of the ratio of the rounds' medians, and its spread."""
    numbers = range(len(rounds[above[0]]))
    found = [
        sum(median(rounds[name][number]) for name in above) / sum(median(rounds[name][number]) for name in below)
        for number in numbers
    ]
    low, high = np.percentile(found, (25, 75))
    return median(found), f"quartiles of {len(found)} rounds: {low:.3g} to {high:.3g}"


def figures_of(nbytes: int, rounds: Rounds) -> list[Figure]:
    """All figures of one size."""
    size = label(nbytes)
    figures = []
    for name in ("copy", *(f"{prefix}{what}" for _, _, prefix in WAYS for what in ("put", "get", "tensor", "touch"))):
        p50, p99 = (percentile_us(rounds[name], percent) for percent in (50, 99))
        limit = {"get": GET_US, "in_place_put": IN_PLACE_US, "in_place_get": GET_US}.get(name)
        figure = f"{name}_p50_{size}"
        figures.append(at_most(figure, p50, "us", limit) if limit else Figure(figure, p50, "us"))
        figures.append(Figure(f"{name}_p99_{size}", p99, "us"))
        if name in ("copy", "put", "ray_put", "touch"):
            figures.append(Figure(f"{name}_{size}", nbytes / p50 / 1e3, "GB/s"))
    ours, in_place, rays = (tuple(f"{prefix}{what}" for what in HANDED_OVER) for _, _, prefix in WAYS)
    compared = (
        ("put_vs_copy", ("copy",), ("put",), PUT_TARGET if nbytes >= MIB else None),
        ("put_get_vs_ray", rays, ours, PAIR_TARGETS.get(nbytes)),
        ("in_place_vs_ray", rays, in_place, IN_PLACE_TARGET),
    )
    for name, above, below, target in compared:
        value, note = ratio(rounds, above, below)
        figure = f"{name}_{size}"
        figures.append(at_least(figure, value, "x", target, note) if target else Figure(figure, value, "x", note=note))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--no-network", action="store_true", help="leave out the part between two hosts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    store = SEGMENT_NBYTES + ROTATED_NBYTES
    ray.init(address="local", num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    handovers = Handovers()
    handovers.touch_everything()
    figures = []
    for nbytes in SIZES:
        figures += figures_of(nbytes, handovers.measure(nbytes, args.rounds))
        print(f"{label(nbytes)} done", file=sys.stderr)
    message = handovers.message_us()
    figures.append(Figure("message_p50", median(message), "us", note="call to the reader with an address, and answer"))
    figures.append(Figure("load_average", os.getloadavg()[0], "1", note=f"of {os.cpu_count()} cores, at the end"))
    ray.shutdown()
    if not args.no_network:
        figures += network_figures()
    emit("mempool", figures, args.json)


if __name__ == "__main__":
    main()
