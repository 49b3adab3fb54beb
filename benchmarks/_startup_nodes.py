"""The processes of emulated actors, and what the controller sees of them.

``EmulatedNodes`` takes the place of the controller's ``Launcher``. An actor's handle there names it in its process, so
the controller has as many handles, calls and references as in a real run. A node is a node id and an address; the
actors of a node are threads of one process.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import ray
from _startup_host import LIMIT_S, NodeLink, note
from ray.actor import ActorHandle

from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.garbage import keep_imports
from flowtrain.actors.link import RayLink
from flowtrain.controller.worker_group import Launcher
from flowtrain.emulation.hosts import EmulatedHandle


@dataclass(frozen=True)
class Cluster:
    """The emulated cluster. Node k has the backbone ranks and encoders of that number, rank by rank."""

    num_nodes: int
    num_processes: int
    """Processes that hold the emulated actors."""
    num_ranks: int
    num_actors: int
    """Of all roles; the coordinator excepted."""

    @property
    def calls_per_process(self) -> int:
        """Calls that a process must answer at once."""
        return 8 + 2 * math.ceil(self.num_actors / self.num_processes)

    def node_of(self, name: str, index: int) -> int:
        """The node of an actor: consecutive ranks share a node, encoders and feeders are spread."""
        return index * self.num_nodes // self.num_ranks if name.startswith("backbone") else index % self.num_nodes


class EmulatedProcess:
    """The Ray actor that holds the emulated actors of some nodes; each call has a thread of its own."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self._actors: defaultdict[str, Future[tuple[Any, int]]] = defaultdict(Future)
        keep_imports()

    def add(self, name: str, node: int, actor_class: type, *args: Any) -> None:
        """Construct an emulated actor."""
        actor = actor_class(*args)
        actor.node = node
        self._actors[name].set_result((actor, node))

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Call an emulated actor, once it is constructed."""
        actor, node = self._actors[name].result(LIMIT_S)
        try:
            return getattr(actor, method)(*(_at(arg, node) for arg in args))
        finally:
            if method == "run":
                note("calls", {"pid": os.getpid(), "calls": NodeLink.calls})


def _at(argument: Any, node: int) -> Any:
    return NodeLink(argument._coordinator, node) if isinstance(argument, RayLink) else argument


class EmulatedNodes(Launcher):
    """Starts the coordinator as a Ray actor, and all others as emulated actors."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._processes: dict[int, ActorHandle] = {}
        self._numbers: defaultdict[type, int] = defaultdict(int)

    def spawn(self, actor_class: type, options: dict[str, Any], *args: Any) -> ActorHandle:
        """See ``Launcher``."""
        if issubclass(actor_class, Coordinator):
            return super().spawn(actor_class, options, *args)
        name, index = options["name"], self._numbers[actor_class]
        self._numbers[actor_class] += 1
        node = self._cluster.node_of(name, index)
        number = node * self._cluster.num_processes // self._cluster.num_nodes
        if number not in self._processes:
            remote: Any = ray.remote(EmulatedProcess)
            calls = self._cluster.calls_per_process
            self._processes[number] = remote.options(num_cpus=0, max_concurrency=calls).remote()
        handle = EmulatedHandle(self._processes[number], name)
        handle.host.add.remote(name, node, actor_class, *args)
        return cast(ActorHandle, handle)

    def kill(self, handle: ActorHandle) -> None:
        """See ``Launcher``; ends the whole process of an emulated actor."""
        super().kill(handle.host if isinstance(handle, EmulatedHandle) else handle)
