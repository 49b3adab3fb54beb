"""The devices that a plan is for, from the command line's options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.cluster import Cluster, DeviceType, data_sheet_device_type
from flowtrain.costs.profile import Profile, library_versions, model_facts
from flowtrain.errors import ConfigError

DEVICES_PER_NODE = 8
DEFAULT_DEVICE = "h200"
MOST_DEVICES = 1 << 20
"""More would only take long to enumerate; the largest clusters have a tenth of that."""

_COUNTED = re.compile(r"(?P<name>.+)=(?:(?P<nodes>[1-9]\d*)x)?(?P<count>[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class SizedType:
    """One type of devices."""

    name: str | None
    """None for the profile's type, or the default."""
    count: int
    per_node: int
    """On each node, or on the smallest one."""


@dataclass(frozen=True, slots=True)
class AskedDevices:
    """The options ``--device`` (once or several times), ``--devices`` and ``--nodes``."""

    types: tuple[str, ...] = ()
    """Each NAME, NAME=COUNT or NAME=NODESxDEVICES; several types need their numbers."""
    devices: int | None = None
    """Number of devices of one type; None if not given."""
    nodes: int | None = None
    """Number of nodes of one type; None if not given."""
    at_hand: tuple[SizedType, ...] = ()
    """Devices that were found; there are no options then."""

    @property
    def has_number(self) -> bool:
        """Whether a number of devices is given, or known."""
        return bool(self.at_hand or self.devices or self.nodes) or any("=" in text for text in self.types)

    @property
    def has_type(self) -> bool:
        """Whether a type of devices is given, or known."""
        return bool(self.at_hand or self.types)


def cluster_of(asked: AskedDevices, planned: Planned, profile: Profile | None) -> Cluster:
    """Return the devices that a plan may use; with a profile, of the type that it was measured on.

    Raises ConfigError if the options contradict each other.
    """
    per_node = DEVICES_PER_NODE if profile is None else profile.known_facts.devices_per_node
    sized = list(asked.at_hand) or _sized(asked, planned, per_node)
    if (total := sum(each.count for each in sized)) > MOST_DEVICES:
        raise ConfigError(f"--devices, --nodes or --device ask for {total} devices; plan at most {MOST_DEVICES}")
    if profile is None:
        types = [
            data_sheet_device_type(
                each.name or DEFAULT_DEVICE,
                each.count,
                devices_per_node=each.per_node,
                dtype=planned.config.model.dtype,
            )
            for each in sized
        ]
        return Cluster(_unlike(types))
    if len(sized) > 1:
        if asked.at_hand:
            raise ConfigError(
                f"{profile.source} was measured on one type of devices, and there are {len(sized)} "
                f"({', '.join(str(each.name) for each in sized)}); plan by data sheets, without allocator.profile, or "
                "train on nodes of one type"
            )
        raise ConfigError(
            f"the profile {profile.source} was measured on one type of devices, and the plan is for {len(sized)}; use "
            "no profile for several types (rates are then from data sheets)"
        )
    (only,) = sized
    same = only.name is None or only.name.lower() in (profile.device_type, profile.device.lower())
    measured_on = profile.device if same or only.name is None else only.name
    profile.check(measured_on, model_facts(planned.config, planned.model), library_versions())
    return Cluster((profile.devices(only.count, only.per_node),))


def _sized(asked: AskedDevices, planned: Planned, per_node: int) -> list[SizedType]:
    counted = [_COUNTED.fullmatch(text.strip()) for text in asked.types]
    if not any(counted):
        if any("=" in text for text in asked.types):
            raise ConfigError(
                f"--device ({', '.join(asked.types)}): give NAME=COUNT or NAME=NODESxDEVICES with numbers from 1, e.g. "
                "h200=64 or h200=8x8"
            )
        if len(asked.types) > 1:
            raise ConfigError(
                f"--device names several types ({', '.join(asked.types)}): give each its number, e.g. --device "
                f"{asked.types[0]}=8 --device {asked.types[1]}=8"
            )
        name = asked.types[0] if asked.types else None
        return [SizedType(name, *_node_shape(asked, planned, per_node))]
    if asked.devices is not None or asked.nodes is not None:
        given = "--devices" if asked.devices is not None else "--nodes"
        raise ConfigError(f"--device ({', '.join(asked.types)}) says how many there are, and so does {given}; drop one")
    sized = []
    for text, found in zip(asked.types, counted, strict=True):
        if found is None:
            raise ConfigError(f"--device ({text}) has no number, but others have one; give {text}=COUNT")
        count, nodes = int(found["count"]), found["nodes"]
        sized.append(
            SizedType(found["name"], count, per_node)
            if nodes is None
            else SizedType(found["name"], int(nodes) * count, count)
        )
    return sized


def _node_shape(asked: AskedDevices, planned: Planned, per_node: int) -> tuple[int, int]:
    """Devices in all and on a node. per_node: used if the options do not decide it."""
    devices, nodes = asked.devices, asked.nodes
    if devices is None and nodes is None:
        if planned.num_devices is None:
            raise ConfigError(
                f"{planned.source} has no degrees that tell a number of devices; give --devices or --nodes"
            )
        return planned.num_devices, per_node
    if nodes is None or devices is None:
        return devices or (nodes or 0) * per_node, per_node
    if devices % nodes:
        fewer, more = devices - devices % nodes, devices + nodes - devices % nodes
        raise ConfigError(
            f"--devices ({devices}) is no multiple of --nodes ({nodes}): nodes have the same number of devices; take "
            f"{f'{fewer} or ' if fewer else ''}{more} devices"
        )
    return devices, devices // nodes


def _unlike(types: Sequence[DeviceType]) -> tuple[DeviceType, ...]:
    names = [each.name for each in types]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--device names {twice} more than once; give it once, with their total number")
    return tuple(types)
