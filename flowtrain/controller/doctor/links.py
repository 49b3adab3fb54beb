"""Measures the links of a cluster: on each node, and between every pair of nodes in rounds of disjoint pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowtrain.controller.doctor.probes import Pair, answers
from flowtrain.controller.doctor.report import NodeReport
from flowtrain.types.memory import Link

Round = tuple[tuple[int, int], ...]
"""Pairs of nodes, by number; no node is in two."""


def rounds(count: int) -> Iterator[Round]:
    """Yield every pair of ``count`` nodes once, in as few rounds as possible: one less than nodes if they are even.

    The first place stays, all others move on (a round-robin tournament); with an odd number one node pauses each round.
    """
    places = list(range(count + count % 2))
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((min(pair), max(pair)) for pair in pairs if max(pair) < count)
        places = [places[0], places[-1], *places[1:-1]]


def measure(nodes: Sequence[NodeReport], probes: Sequence[Pair], timeout_s: float) -> tuple[Link, ...]:
    """Measure each node's own links, then those of all pairs of nodes in both directions.

    Nodes measure at the same time, but none takes part in two measurements at once.
    """
    names = {node.node_id: node.name for node in nodes}
    found: list[Link] = []

    def read(pairs: Sequence[tuple[int, int]], is_own: bool = False) -> None:
        """Each pair: the second node reads the first; on one node, the second probe reads itself or the first."""
        exports = answers([probes[owner][1 if is_own else 0].export.remote() for owner, _ in pairs], timeout_s)
        calls = [probes[reader][1].measure.remote(each) for (_, reader), each in zip(pairs, exports, strict=True)]
        for measured in answers(calls, timeout_s):
            found.extend(replace(x, source=names[x.source], destination=names[x.destination]) for x in measured)

    own = [(number, number) for number in range(len(probes))]
    read(own, is_own=True)
    read(own)
    for pairs in rounds(len(probes)):
        read(pairs)
        read([(second, first) for first, second in pairs])
    return tuple(found)
