"""The devices at hand: of the Ray cluster that a run starts on, or of this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.emulated import EmulatedConfig
from flowtrain.config.run import RunConfig
from flowtrain.controller.cluster import ACCELERATOR_TYPE
from flowtrain.controller.planning.devices import SizedType
from flowtrain.controller.planning.mode_plan import cpus_of_a_device
from flowtrain.costs.devices import device_spec
from flowtrain.costs.profiled_times import CPU
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.models.device import device_name

UNKNOWN_TYPE = "an accelerator of unknown type"


@dataclass(frozen=True, slots=True)
class DevicesAtHand:
    """Devices by type, and where they are."""

    sized: tuple[SizedType, ...]
    where: str

    @property
    def text(self) -> str:
        """All of them, in words."""
        counts = " and ".join(f"{each.count} {each.name or 'measured devices'}" for each in self.sized)
        return f"{counts} of {self.where}"

    def only(self, count: int | None) -> DevicesAtHand:
        """Return the first ``count`` of them, all for None; ConfigError if there are fewer, or several types."""
        if count is None:
            return self
        if len(self.sized) > 1:
            raise ConfigError(f"--devices ({count}) does not tell of which type: there are {self.text}; leave it out")
        (only,) = self.sized
        if count > only.count:
            raise ConfigError(f"--devices ({count}) is more than there are: {self.text}; take at most {only.count}")
        return replace(self, sized=(replace(only, count=count, per_node=min(only.per_node, count)),))


def of_cluster(config: RunConfig, count: int | None = None) -> DevicesAtHand:
    """Return the devices of the cluster that this process is connected to; without accelerators its CPUs count.

    count: at most so many; None: all. Raises ConfigError if there are fewer.
    """
    if config.emulation is not None:
        return emulated(config, config.emulation, count)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    where = "the Ray cluster" if os.environ.get("RAY_ADDRESS") else "this machine"
    return DevicesAtHand(by_type(nodes, config), where).only(count)


def by_type(nodes: Sequence[Mapping[str, Any]], config: RunConfig) -> tuple[SizedType, ...]:
    """Return the devices of nodes with these resources, as Ray counts them. Pure."""
    on_nodes: dict[str, list[int]] = {}
    if config.model.device != "cpu":
        for node in nodes:
            if count := int(node.get("GPU", 0)):
                names = (name.removeprefix(ACCELERATOR_TYPE) for name in node if name.startswith(ACCELERATOR_TYPE))
                on_nodes.setdefault(next(names, UNKNOWN_TYPE), []).append(count)
    if not on_nodes:
        each = cpus_of_a_device(config)
        on_nodes[CPU] = [count for node in nodes if (count := int(node.get("CPU", 0) // each))]
    # Tensor parallel groups stay inside a node, so the smallest one limits them.
    return tuple(SizedType(name, sum(counts), min(counts)) for name, counts in on_nodes.items() if counts)


def emulated(config: RunConfig, emulation: EmulatedConfig, count: int | None) -> DevicesAtHand:
    """Return emulated devices: ``count``, else ``emulated.devices``, else as many as the configured degrees take.

    Raises ConfigError if modules are on devices of another type, which one plan of these would not rate.
    """
    _check_one_type(config, emulation)
    count = count or emulation.devices
    if count is None:
        plan = fixed_plan(config)
        encoders = plan.encoders.values() if plan.mode != "colocated" else ()
        count = plan.backbone.num_actors + sum(module.num_actors for module in encoders)
    name = emulation.device if emulation.profile is None else None  # a profile names its device
    sized = SizedType(name, count, min(count, emulation.devices_per_node))
    return DevicesAtHand((sized,), "an emulated cluster")


def _check_one_type(config: RunConfig, emulation: EmulatedConfig) -> None:
    types = {f"encoders.{name}": each.accelerator_type for name, each in config.encoders.items()}
    for section, kind in {**types, "backbone": config.backbone.accelerator_type}.items():
        if kind is not None and device_spec(kind) != device_spec(emulation.device):
            key = f"{section}.accelerator_type"
            raise ConfigError.of(
                key,
                FaultCode.CONFLICT,
                f"{key} ({kind}) is not emulated.device ({emulation.device}), and mode 'auto' plans emulated devices "
                "of one type; unset the first with =null, or set the mode",
            )


def of_machine(config: RunConfig, count: int | None = None) -> DevicesAtHand:
    """Return this machine's devices, without a cluster; as ``of_cluster``."""
    if config.emulation is not None:
        return emulated(config, config.emulation, count)
    resources: dict[str, float] = {"CPU": os.cpu_count() or 1}
    if config.model.device == "cpu" or not torch.accelerator.is_available():
        return DevicesAtHand(by_type([resources], config), "this machine").only(count)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    every = (torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count()))
    counts = Counter(device_name(device) for device in every)
    sized = tuple(SizedType(name, number, number) for name, number in counts.items())
    return DevicesAtHand(sized, "this machine").only(count)
