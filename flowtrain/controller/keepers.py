"""The actors that keep snapshots of the backbone in their nodes' memory; they outlive the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.actors.keeper import ANSWER_S, RayKeeper
from flowtrain.config.run import RunConfig
from flowtrain.controller.worker_group import ActorClasses, namespace_of

logger = logging.getLogger(__name__)


class Keepers:
    """One keeper on each node that has ranks, from their first start to the end of the run."""

    def __init__(self, config: RunConfig, classes: ActorClasses) -> None:
        self._config, self._classes = config, classes
        self._handles: dict[str, ActorHandle] = {}  # by node
        self._nodes: dict[int, str] = {}  # by rank
        self._num_started = 0

    @property
    def is_on(self) -> bool:
        """Whether snapshots are taken; emulated devices have no state."""
        return self._config.checkpoint.snapshot_every_steps is not None and self._config.emulation is None

    def for_ranks(self, nodes: Mapping[int, str]) -> dict[int, RayKeeper]:
        """Return the keeper of each rank's node; one is started where there is none. nodes: their ids, by rank."""
        self._nodes = dict(nodes)
        return {rank: RayKeeper(self._on(node)) for rank, node in nodes.items()}

    def _on(self, node: str) -> ActorHandle:
        if node not in self._handles:
            options = {
                "name": f"snapshots-{self._num_started}",
                "namespace": namespace_of(self._config),
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            self._num_started += 1
            self._handles[node] = self._classes.launcher.spawn(self._classes.keeper, options)
        return self._handles[node]

    def completed(self, step: int) -> None:
        """Tell all keepers that the snapshot after a step is complete."""
        for handle in self._handles.values():
            handle.completed.remote(step)

    def complete_steps(self) -> set[int]:
        """Return the steps after which the state of every rank lies on its node.

        A keeper that does not answer is ended, with a line in the log.
        """
        calls: dict[str, ray.ObjectRef[dict[int, tuple[int, ...]]]] = {
            node: handle.steps.remote() for node, handle in self._handles.items()
        }
        kept: dict[int, set[int]] = {}
        for node, call in calls.items():
            try:
                steps = ray.get(call, timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                logger.warning("the snapshots of node %s are lost: %s", node, str(error).partition("\n")[0])
                self._classes.launcher.kill(self._handles.pop(node))
            else:
                kept |= {rank: set(own) for rank, own in steps.items() if self._nodes.get(rank) == node}
        every = [kept.get(rank, set()) for rank in self._nodes]
        return set.intersection(*every) if every else set()

    def close(self) -> None:
        """End the keepers, and with them the memory."""
        for handle in self._handles.values():
            self._classes.launcher.kill(handle)
        self._handles.clear()
