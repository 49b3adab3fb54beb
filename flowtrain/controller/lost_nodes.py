"""Tells when a node of the run is lost, and when another one has taken its place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from flowtrain.controller.cluster import alive_nodes, counts_text

POLL_S = 5.0
NODE = "a node"
"""Its name, where an actor's would stand."""
NOTICE_S = 20.0
"""Ray may take so long to notice a node that was cut off; it counts missed heartbeats."""
_LOST = "RESCHEDULING"
"""State of a placement group of which bundles have lost their node: Ray looks for another one, without a limit."""


class NodeWatch:
    """Asks Ray now and then where the run's bundles are.

    group: the bundles; None: there are none. warn, note: show a line to the user.
    """

    def __init__(
        self,
        group: PlacementGroup | None,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._warn, self._note, self._clock = group, warn, note, clock
        self._asked_s = clock()
        self._had = self._used()
        self.lost_since_s: float | None = None
        """On the clock; None: all of the run's nodes are there."""

    def poll(self) -> None:
        """Ask, if it is time to; call it often."""
        if self._group is None or self._clock() - self._asked_s < POLL_S:
            return
        self._asked_s = self._clock()
        lost = self._lost()
        if lost is None:
            return
        if lost and self.lost_since_s is None:
            self.lost_since_s = self._asked_s
            self._warn(
                f"a node of the run is lost: {lost}, which may join at any time; what was there starts again then"
            )
        elif self.lost_since_s is not None and not lost:
            self.lost_since_s = None
            self._note("the run has all its nodes again")
        if not lost:
            self._had |= self._used()

    def has_lost_one(self, within_s: float = NOTICE_S, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Whether a node of the run was lost, though another one may have taken its place.

        To be asked after an actor was lost, which shows earlier. Waits for Ray to notice, unless all are on one node.
        """
        deadline_s = self._clock() + within_s
        while not self._has_lost_one_it_had():
            if len(self._had) < 2 or self._clock() > deadline_s:
                return False
            sleep(1.0)
        return True

    def _has_lost_one_it_had(self) -> bool:
        try:
            return not self._had <= alive_nodes()
        except (ray.exceptions.RayError, OSError, RuntimeError):
            return False

    @property
    def num_used(self) -> int:
        """Number of nodes that the run's bundles are on; 0: there are none, or Ray does not say."""
        return len(self._used())

    def _used(self) -> set[str]:
        """Nodes of the run's bundles; none: there are none, or Ray does not say."""
        if self._group is None:
            return set()
        try:
            nodes = placement_group_table(self._group)["bundles_to_node_id"].values()
        except (ray.exceptions.RayError, OSError, RuntimeError):
            return set()
        return {node for node in nodes if node}  # one that is lost may be empty

    @property
    def reason(self) -> str:
        """What to add to a message about actors that do not start; empty if all of them have a node."""
        lost = self._lost()
        return f"; a node of the run is lost, and {lost}" if lost else ""

    def _lost(self) -> str | None:
        """Say what has no node; empty: all of it has. None: Ray does not say."""
        if self._group is None:
            return ""
        try:
            table: dict[str, Any] = placement_group_table(self._group)
            alive = alive_nodes()
        except (ray.exceptions.RayError, OSError, RuntimeError):
            return None
        if table.get("state") != _LOST:
            return ""
        places, bundles = table["bundles_to_node_id"], table["bundles"]
        homeless = [index for index in bundles if places.get(index) not in alive]
        needs = "; ".join(sorted({counts_text(bundles[index]) for index in homeless}))
        return f"{len(homeless)} of {len(bundles)} groups of actors wait for a node with free resources ({needs})"
