"""A run on emulated devices, as the controller starts it: real coordinator and feeders, other actors in hosts."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from flowtrain.config.run import RunConfig
from flowtrain.controller.worker_group import ActorClasses, Launcher
from flowtrain.emulation.encoder import EmulatedEncoder, EmulatedEncoderRank
from flowtrain.emulation.hosts import CLASSES, EmulatedHandle, Hosts, on_this_node
from flowtrain.emulation.meetings import create_memory
from flowtrain.emulation.rank import EmulatedRank
from flowtrain.types.plan import Degrees


class EmulatedLauncher(Launcher):
    """Puts emulated actors into processes of ``emulated.ranks_per_process`` devices."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        settings = config.emulation
        assert settings is not None
        self._config, self._settings = config, settings
        backbone = config.backbone
        self._degrees = Degrees(
            backbone.data_parallel_size, backbone.pipeline_parallel_size, backbone.tensor_parallel_size
        )
        self._replicas = max(1, settings.ranks_per_process // self._degrees.replica_size)
        memory = None
        if self._degrees.dp > self._replicas:
            descriptor = os.memfd_create("flowtrain-emulated")  # no file, so that none can be left over
            weakref.finalize(self, os.close, descriptor)
            memory = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            create_memory(memory, self._degrees)
        self._hosts = Hosts(config, memory)

    def spawn(self, actor_class: type, options: dict[str, Any], *args: Any) -> ActorHandle:
        """See ``Launcher``."""
        if not issubclass(actor_class, CLASSES):
            return super().spawn(actor_class, {"scheduling_strategy": on_this_node(), **options}, *args)
        limit = max(self._settings.ranks_per_process, self._degrees.replica_size)
        name: str = options["name"]
        if issubclass(actor_class, EmulatedRank):
            return self._hosts.spawn(self._place_of_rank(args[1]), 2 * limit, name, actor_class, *args)
        replica = int(name.split("-")[1])
        first = replica * self._config.encoders[args[1]].tensor_parallel_size
        place = f"{args[1]}-{first // self._settings.ranks_per_process}"
        if self._config.mode == "colocated":
            place = self._place_of_rank(first)
        more = (replica,) if issubclass(actor_class, EmulatedEncoder) else ()
        return self._hosts.spawn(place, 2 * limit, name, actor_class, *more, *args)

    def kill(self, handle: ActorHandle) -> None:
        """See ``Launcher``; ends the whole process of an emulated actor."""
        if isinstance(handle, EmulatedHandle):
            self._hosts.kill(handle)
        else:
            super().kill(handle)

    def _place_of_rank(self, rank: int) -> str:
        return f"backbone-{rank // self._degrees.replica_size // self._replicas}"


def actor_classes(config: RunConfig) -> ActorClasses:
    """Return the classes of a run's actors."""
    if config.emulation is None:
        return ActorClasses()
    return ActorClasses(
        encoder=EmulatedEncoder,
        encoder_rank=EmulatedEncoderRank,
        backbone=EmulatedRank,
        launcher=EmulatedLauncher(config),
    )
