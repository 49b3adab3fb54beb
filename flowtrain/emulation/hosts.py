"""The processes of emulated actors, as Ray actors, and the launcher that puts actors into them."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.actors.garbage import keep_imports
from flowtrain.config.run import RunConfig
from flowtrain.emulation.encoder import EmulatedEncoder, EmulatedEncoderRank
from flowtrain.emulation.process import EmulatedProcess, EmulatedRun
from flowtrain.emulation.rank import EmulatedRank
from flowtrain.errors import StallError

SWITCH_INTERVAL_S = 0.0005
"""Seconds until a thread that wakes up may run; Python's default is 5 ms."""
CONSTRUCT_S = 300.0
CLASSES = (EmulatedEncoder, EmulatedEncoderRank, EmulatedRank)


class EmulatedHost:
    """A process that holds emulated actors; each call has a thread of its own."""

    def __init__(self, config: RunConfig, memory: str | None) -> None:
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        torch.set_num_threads(1)
        self._process = EmulatedProcess(EmulatedRun.of(config, None if memory is None else Path(memory)))
        self._actors: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        keep_imports()

    def add(self, name: str, actor_class: type, *args: Any) -> None:
        """Construct an actor; its calls raise what that raises."""
        future = self._future(name)
        try:
            future.set_result(actor_class(self._process, *args))
        except BaseException as error:
            future.set_exception(error)  # nobody waits for this call

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Call an actor, once it is constructed; an error ends the waits of all in the run."""
        try:
            return getattr(self._constructed(name), method)(*args)
        except BaseException:
            self._process.fail()
            raise

    def _constructed(self, name: str) -> Any:
        future = self._future(name)
        wait([future], CONSTRUCT_S)
        if not future.done():
            raise StallError(f"{name} (emulated) was not constructed within {CONSTRUCT_S:g} s; see its process's log")
        return future.result()

    def _future(self, name: str) -> Future[Any]:
        with self._lock:
            return self._actors.setdefault(name, Future())


@dataclass(frozen=True)
class EmulatedHandle:
    """A handle of an emulated actor: each of its methods has ``remote``, as of a Ray actor."""

    host: ActorHandle
    name: str

    def __getattr__(self, method: str) -> _RemoteMethod:
        if method.startswith("__") or method in ("host", "name"):  # what copies and pickles look for
            raise AttributeError(method)
        return _RemoteMethod(self.host, self.name, method)


@dataclass(frozen=True)
class _RemoteMethod:
    host: ActorHandle
    name: str
    method: str

    def remote(self, *args: Any) -> ray.ObjectRef[Any]:
        """Start the call."""
        reference: ray.ObjectRef[Any] = self.host.call.remote(self.name, self.method, *args)
        return reference


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the strategy for actors of emulated devices: Ray reserves nothing for them, and they share memory."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class Hosts:
    """Starts the processes of a run's emulated actors, as actors need them."""

    def __init__(self, config: RunConfig, memory: Path | None) -> None:
        self._config, self._memory = config, memory
        self._running: dict[str, ActorHandle] = {}

    def spawn(self, place: str, num_actors: int, name: str, actor_class: type, *args: Any) -> ActorHandle:
        """Start an actor in the process of this name. num_actors: that the process will have."""
        host = self._running.get(place)
        if host is None:
            remote: Any = ray.remote(EmulatedHost)
            threads = 4 + 3 * num_actors
            options = remote.options(num_cpus=0, max_concurrency=threads, scheduling_strategy=on_this_node())
            host = options.remote(self._config, None if self._memory is None else str(self._memory))
            self._running[place] = host
        host.add.remote(name, actor_class, *args)
        return cast(ActorHandle, EmulatedHandle(host, name))

    def kill(self, handle: EmulatedHandle) -> None:
        """End the process of an actor, with all others in it."""
        self._running = {place: host for place, host in self._running.items() if host != handle.host}
        ray.kill(handle.host, no_restart=True)
