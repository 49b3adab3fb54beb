"""Actors that measure for ``flowtrain profile``: placed on one node's devices, asked, and ended."""

from __future__ import annotations

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
from flowtrain.controller.memory_env import memory_options
from flowtrain.errors import FlowTrainError, ResourceError
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import CallTimes


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
                        **(memory_options() if self.kind == "CPU" else {}),
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
        finally:
            ray.kill(echo, no_restart=True)
        assert isinstance(times, CallTimes)
        return times

    def answers(self, calls: Sequence[ray.ObjectRef[Any]], limit_s: float | None = None) -> list[Any]:
        """Wait for actors, by default as long as a start may take.

        Raises ResourceError if one does not answer, otherwise the error that it raised.
        """
        limits = self._config.limits
        key = "start_timeout_s" if limit_s is None else "stall_timeout_s"
        limit_s = limits.start_limit_s if limit_s is None else limit_s
        try:
            return ray.get(list(calls), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ResourceError(
                f"measuring took longer than limits.{key} ({limit_s:g} s); raise it, or measure smaller microbatches"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:  # it died, or Ray killed it for lack of memory
            raise ResourceError(f"a process that measures was lost: {error}") from error

    def measured(self, calls: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Wait for actors that compute; raises as ``answers``."""
        return self.answers(calls, self._config.limits.stall_timeout_s)
