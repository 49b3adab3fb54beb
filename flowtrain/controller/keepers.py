"""The actors that keep snapshots of the backbone in their nodes' memory; they outlive the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

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
        """Let all keepers give up what is older than the snapshot after a step, which is complete."""
        for handle in self._handles.values():
            handle.completed.remote(step)

    def complete_steps(self) -> set[int]:
        """Return the steps after which the state of every rank lies on its node."""
        kept: dict[int, set[int]] = {}
        for node, steps in self._ask(lambda handle: handle.steps.remote()).items():
            kept |= {rank: set(own) for rank, own in steps.items() if self._nodes.get(rank) == node}
        every = [kept.get(rank, set()) for rank in self._nodes]
        return set.intersection(*every) if every else set()

    def keep_only(self, step: int | None) -> None:
        """Let all keepers give up the snapshots of all other steps, and wait until they have."""
        self._ask(lambda handle: handle.keep_only.remote(step))

    def _ask(self, question: Callable[[ActorHandle], ray.ObjectRef[Any]]) -> dict[str, Any]:
        """Return the keepers' answers by node; one that does not answer is ended, with a line in the log."""
        calls = {node: question(handle) for node, handle in self._handles.items()}
        if not calls:
            return {}
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        answers = {}
        for node, call in calls.items():
            try:
                if call not in done:
                    raise ray.exceptions.GetTimeoutError(f"no answer within {ANSWER_S:g} s")
                answers[node] = ray.get(call)
            except ray.exceptions.RayError as error:
                logger.warning("the snapshots of node %s are lost: %s", node, str(error).partition("\n")[0])
                self._classes.launcher.kill(self._handles.pop(node))
        return answers

    def close(self) -> None:
        """End the keepers, and with them the memory."""
        for handle in self._handles.values():
            self._classes.launcher.kill(handle)
        self._handles.clear()
