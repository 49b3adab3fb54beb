"""The actors that keep snapshots of the backbone in their nodes' memory, and copies of other nodes' snapshots."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.actors.keeper import ANSWER_S, NUM_THREADS, KnownKeeper, RayKeeper
from flowtrain.config.run import RunConfig
from flowtrain.controller.cluster import alive_nodes
from flowtrain.controller.worker_group import ActorClasses, namespace_of

logger = logging.getLogger(__name__)

CHECK_S = 15.0
"""After a question whether all keepers answer, until the next one."""


class Keepers:
    """One keeper on each node that has ranks, from their first start to the end of the run.

    A snapshot that is complete is copied once more: each node's by the next node's keeper. Only then earlier snapshots
    are given up. If one node has all ranks, any other node of the cluster keeps the copy. One that died or hangs is
    replaced; ranks find the new one by its name.
    """

    def __init__(self, config: RunConfig, classes: ActorClasses, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._classes, self._clock = config, classes, clock
        self._handles: dict[str, ActorHandle] = {}  # by node
        self._known: dict[str, KnownKeeper] = {}  # by node
        self._nodes: dict[int, str] = {}  # by rank
        self._checks: dict[str, ray.ObjectRef[Any]] = {}  # by node
        self._checked_s = clock()
        self._start_step: int | None = None  # of the snapshot from which ranks start
        self._newest: int | None = None  # that is being copied
        self._copies: dict[ray.ObjectRef[None], str] = {}
        self._uncopied: set[str] = set()  # nodes of which a copy failed

    @property
    def is_on(self) -> bool:
        """Whether snapshots are taken; emulated devices have no state."""
        return self._config.checkpoint.snapshot_every_steps is not None and self._config.emulation is None

    def for_ranks(self, nodes: Mapping[int, str]) -> dict[int, RayKeeper]:
        """Return the keeper of each rank's node; one is started where there is none. nodes: their ids, by rank.

        A rank that starts on another node than before finds its snapshot there, if any keeper has it.
        """
        self._nodes = dict(nodes)
        keepers = {rank: RayKeeper(self._on(node), self._known[node]) for rank, node in nodes.items()}
        if self._start_step is not None:
            self._bring(self._start_step)
        return keepers

    def _on(self, node: str) -> ActorHandle:
        if node not in self._handles:
            number = self._known[node].number + 1 if node in self._known else 0
            known = self._known[node] = KnownKeeper(node, number, namespace_of(self._config))
            options = {
                "name": known.name,
                "namespace": known.namespace,
                "num_cpus": 0,
                "max_concurrency": NUM_THREADS,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            self._handles[node] = self._classes.launcher.spawn(self._classes.keeper, options)
        return self._handles[node]

    def _bring(self, step: int) -> None:
        """Copy snapshots to the nodes where their ranks are now; a rank that finds none says so itself."""
        kept = self._ask(lambda handle: handle.steps.remote())
        wanted: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, node in self._nodes.items():
            sources = [each for each, steps in kept.items() if step in steps.get(rank, ())]
            if sources and node not in sources:
                wanted[sources[0], node].append(rank)
        calls: dict[ray.ObjectRef[None], str] = {
            self._on(to).copy.remote(RayKeeper(self._handles[source]), ranks, step): to
            for (source, to), ranks in wanted.items()
        }
        if not calls:
            return
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=self._limit_s)
        for call in done:
            if (reason := _failure(call)) is not None:
                logger.warning("node %s has no snapshot of its ranks: %s", calls[call], reason)
        for call in late:
            logger.warning("node %s has no snapshot of its ranks within %g s", calls[call], self._limit_s)

    @property
    def _limit_s(self) -> float:
        return self._config.limits.start_limit_s

    def completed(self, step: int) -> None:
        """Copy the snapshot after a step, which all ranks have; then give up what is older."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, node in self._nodes.items():
            ranks[node].append(rank)
        self._newest = step
        self._copies = {}  # ranks give no other snapshot while one is copied
        for node, own in ranks.items():
            if node in self._handles and (neighbour := self._neighbour(node, sorted(ranks))) is not None:
                self._copies[self._on(neighbour).copy.remote(RayKeeper(self._handles[node]), own, step)] = node
        self.poll()

    def _neighbour(self, node: str, with_ranks: list[str]) -> str | None:
        """Return the node that copies a node's snapshots; None: the cluster has no other node."""
        if len(with_ranks) > 1:
            return with_ranks[(with_ranks.index(node) + 1) % len(with_ranks)]
        kept_by = sorted(self._handles.keys() - {node})  # so that it stays the same one
        others = sorted(alive_nodes() - {node})
        return next((each for each in (*kept_by, *others) if each in others), None)

    def poll(self) -> None:
        """Look whether the newest snapshot is copied, and now and then whether all keepers answer; never waits."""
        if self._checks or self._clock() - self._checked_s >= CHECK_S:
            self._check()
        if self._newest is None:
            return
        done, waiting = (
            ray.wait(list(self._copies), num_returns=len(self._copies), timeout=0) if self._copies else ([], [])
        )
        for call in done:
            node = self._copies.pop(call)
            reason = _failure(call)
            if reason is None:
                self._uncopied.discard(node)
            elif node not in self._uncopied:
                self._uncopied.add(node)
                logger.warning("snapshots of node %s have no copy on another node: %s", node, reason)
        if not waiting:
            for handle in self._handles.values():
                handle.completed.remote(self._newest)
            self._newest = None

    def _check(self) -> None:
        """Ask all keepers, or look at their answers; start another one where there is none."""
        if not self._checks:
            self._checked_s = self._clock()
            self._checks = {node: handle.steps.remote() for node, handle in self._handles.items()}
            return
        is_late = self._clock() - self._checked_s >= ANSWER_S
        done, _ = ray.wait(list(self._checks.values()), num_returns=len(self._checks), timeout=0)
        for node, call in list(self._checks.items()):
            reason = _failure(call) if call in done else f"no answer within {ANSWER_S:g} s" if is_late else ""
            if reason == "":
                continue
            del self._checks[node]
            if reason is not None and node in self._handles:
                self._replace(node, reason)

    def _replace(self, node: str, reason: str) -> None:
        self._classes.launcher.kill(self._handles.pop(node))
        if node in alive_nodes():
            logger.warning("the keeper of node %s is lost with its snapshots (%s); another one starts", node, reason)
            self._on(node)

    def has_lost_a_node(self) -> bool:
        """Whether a node is gone on which ranks were when they last started."""
        return not set(self._nodes.values()) <= alive_nodes()

    def complete_steps(self) -> set[int]:
        """Return the steps after which the state of every rank lies on some node."""
        kept: dict[int, set[int]] = defaultdict(set)
        for steps in self._ask(lambda handle: handle.steps.remote()).values():
            for rank, own in steps.items():
                kept[rank] |= set(own)
        every = [kept[rank] for rank in self._nodes]
        return set.intersection(*every) if every else set()

    def keep_only(self, step: int | None) -> None:
        """Let all keepers give up the snapshots of all other steps, and wait until they have."""
        self._newest, self._copies, self._checks, self._start_step = None, {}, {}, step
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
                logger.warning("the snapshots of node %s are lost: %s", node, _first_line(error))
                self._classes.launcher.kill(self._handles.pop(node))
        return answers

    def close(self) -> None:
        """End the keepers, and with them the memory."""
        for handle in self._handles.values():
            self._classes.launcher.kill(handle)
        self._handles.clear()
        self._newest, self._copies, self._checks = None, {}, {}


def _failure(call: ray.ObjectRef[None]) -> str | None:
    """Why a call that has ended failed; None: it did not."""
    try:
        ray.get(call, timeout=0)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.RayError as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
