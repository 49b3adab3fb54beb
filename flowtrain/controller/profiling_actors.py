"""Actors that measure for ``flowtrain profile``: placed on one node's devices, asked, and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowtrain.actors.link import RayLink
from flowtrain.actors.profiler import Echo, Profiler
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.memory_env import memory_variables
from flowtrain.controller.outcomes import Died, Failed, Returned, outcome_of, root_cause_first
from flowtrain.errors import CoordinatorLostError, FlowTrainError, ResourceError
from flowtrain.training.profile_memory import LOG_LEVEL, ONLY_FAULTS
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import CallTimes

_GRACE_S = 5.0
"""From the first call that fails until the others count as waiting for it: a rank may fail before the one it lost."""


class ProfilerLost(ResourceError):
    """A process that measures is gone. The message is the reason alone."""


class Profilers:
    """Starts profilers and waits for their answers. kind: Ray's name of a device, ``GPU`` or ``CPU``."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        self._config, self.kind = config, kind

    @contextmanager
    def started(self, ranks: Sequence[tuple[int, Degrees]], *, on_one: bool = False) -> Iterator[list[ActorHandle]]:
        """One profiler for each rank on a device of its own, all on one node; on_one: all share one device."""
        bundles: list[cluster.Bundle] = [{self.kind: 1.0}] * (1 if on_one else len(ranks))
        cluster.check_resources(bundles, 0)
        remote: Any = ray.remote(Profiler)
        actors: list[ActorHandle] = []
        share = int(1e4 / len(ranks)) / 1e4 if on_one else 1.0
        with cluster.placed(bundles, self._config.limits.placement_timeout_s) as group:
            try:
                for index, (rank, degrees) in enumerate(ranks):
                    options = {
                        "num_cpus": share * (self.kind == "CPU"),
                        "num_gpus": share * (self.kind == "GPU"),
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(
                            group, placement_group_bundle_index=0 if on_one else index
                        ),
                        **(_cpu_options() if self.kind == "CPU" else {}),
                    }
                    actors.append(remote.options(**options).remote(self._config, rank, degrees))
                yield actors
            finally:
                for actor in actors:
                    ray.kill(actor, no_restart=True)

    def calls(self, actor: ActorHandle) -> CallTimes:
        """Let an actor measure its calls to another one."""
        remote: Any = ray.remote(Echo)
        echo = remote.options(num_cpus=0).remote()
        try:
            (times,) = self.answers([actor.calls.remote(RayLink(echo))])
        except CoordinatorLostError as error:  # the link's name for whoever it leads to
            raise ProfilerLost("the process that it asked is gone, or silent") from error
        finally:
            ray.kill(echo, no_restart=True)
        assert isinstance(times, CallTimes)
        return times

    def answers(self, calls: Sequence[ray.ObjectRef[Any]], limit_s: float | None = None) -> list[Any]:
        """Wait for actors, by default as long as a start may take.

        Raises ProfilerLost if one is gone, ResourceError if one does not answer or cannot start, otherwise the error
        that it raised.
        """
        limits = self._config.limits
        key = "start_timeout_s" if limit_s is None else "stall_timeout_s"
        limit_s = limits.start_limit_s if limit_s is None else limit_s
        ends_s, waiting, failed = time.monotonic() + limit_s, list(calls), dict[ray.ObjectRef[Any], Died | Failed]()
        while waiting and (left_s := ends_s - time.monotonic()) > 0.0:
            done, waiting = ray.wait(waiting, timeout=left_s)
            for call in done:
                if not isinstance(outcome := outcome_of(call, "a process that measures"), Returned):
                    ends_s = min(ends_s, time.monotonic() + _GRACE_S)
                    failed[call] = outcome
        if failed:
            first = root_cause_first(failed)[0]
            if isinstance(outcome := failed[first], Died):
                raise ProfilerLost(outcome.reason)
            if isinstance(outcome.error, FlowTrainError):
                raise outcome.error
            if outcome.lost_peer:
                raise ProfilerLost(f"it lost another rank: {outcome.error}")
            if isinstance(outcome.error, ray.exceptions.RayError):
                raise ResourceError(f"a process cannot measure: {outcome.error}") from outcome.error
            ray.get(first)  # raises it with the actor's traceback
        if waiting:
            raise ResourceError(
                f"measuring took longer than limits.{key} ({limit_s:g} s); raise it, or measure smaller microbatches"
            )
        return ray.get(list(calls))

    def measured(self, calls: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Wait for actors that compute; raises as ``answers``."""
        return self.answers(calls, self._config.limits.stall_timeout_s)


def _cpu_options() -> dict[str, Any]:
    """Return Ray's options of an actor that measures a CPU.

    Variables come with the process: Ray's threads read the environment, which must not change meanwhile.
    """
    quiet = {LOG_LEVEL: os.environ.get(LOG_LEVEL, ONLY_FAULTS)}
    return {"runtime_env": {"env_vars": quiet | memory_variables()}}
