"""The devices of a cluster: types, the number of each, the links between them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from flowtrain.costs.devices import DEVICES, device_spec
from flowtrain.errors import ConfigError

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of one device in one direction."""

    node: float
    """To its node's other devices, in bytes/s."""
    network: float
    """To other nodes, in bytes/s."""
    source: str
    """Where the figures are from."""
    host: float = 32 * _GB
    """To its node's host memory, in bytes/s; PCIe 4.0 with 16 lanes if not stated."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Devices of one kind."""

    name: str
    """Short key (``h200``), or torch's name of the device."""
    count: int
    flops: float
    """Dense peak in FLOP/s in the run's compute type."""
    memory_nbytes: int
    """Of the device memory."""
    bandwidth: float
    """Of the device memory, in bytes/s."""
    links: Links
    devices_per_node: int = 8
    """Tensor parallel groups stay inside a node."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices, by type; most clusters have one."""

    device_types: tuple[DeviceType, ...]

    def __post_init__(self) -> None:
        names = [each.name for each in self.device_types]
        assert names and len(set(names)) == len(names), names

    @property
    def counts(self) -> dict[str, int]:
        """Devices of each type, by name."""
        return {each.name: each.count for each in self.device_types}

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return sum(each.count for each in self.device_types)

    def __getitem__(self, name: str) -> DeviceType:
        return next(each for each in self.device_types if each.name == name)


def data_sheet_device_type(
    name: str, count: int, *, devices_per_node: int = 8, dtype: str = "bfloat16", links: Links | None = None
) -> DeviceType:
    """Return a device type by data sheets, for planning without devices.

    name: a short key (``h200``) or torch's name of the device. links: measured links; None: by data sheet. Raises
    ConfigError for a device that is not in the table.
    """
    spec = device_spec(name)
    if spec is None:
        if name.lower() == "cpu":
            raise ConfigError(
                "--device (cpu) has no data sheet here; measure it with flowtrain profile CONFIG --save FILE (with "
                "model.device=cpu), and give --profile FILE"
            )
        keys = [each.key for each in DEVICES]
        near = difflib.get_close_matches(name.lower(), keys, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--device ({name}) is not in the table of devices; take one of {', '.join(keys)}{meant}")
    flops = spec.peak_flops(dtype)
    if flops is None:
        raise ConfigError(f"--device ({name}) has no public peak for model.dtype ({dtype}); use bfloat16 or a profile")
    return DeviceType(
        spec.key,
        count,
        flops,
        spec.memory_nbytes,
        spec.bandwidth,
        links if links is not None else _LINKS[spec.key],
        devices_per_node,
    )


def accelerator_type(name: str) -> str:
    """Return Ray's name of a device of the table, as in a node's resource ``accelerator_type:H200``.

    Ray does not distinguish variants: it names an ``h100-pcie`` H100.
    """
    chip = name.partition("-")[0].upper()
    return f"Ascend{chip}" if chip.startswith("910") else chip


def _links(node: float, network_gbit: float, source: str, host: float = 32) -> Links:
    network = f"network: {network_gbit:g} Gb/s a device is assumed"
    return Links(node * _GB, network_gbit / 8 * _GB, f"{source}; {network}", host * _GB)


_NVLINK = "data sheet's NVLink figure, one direction"
_PCIE = "data sheet's PCIe figure, one direction"
_PCIE_5 = 64
"""GB/s of 16 lanes in one direction."""
_LINKS = {
    "b200": _links(900, 400, _NVLINK, _PCIE_5),
    "h200-nvl": _links(450, 400, _NVLINK, _PCIE_5),
    "h200": _links(450, 400, _NVLINK, _PCIE_5),
    "h100-nvl": _links(300, 400, _NVLINK, _PCIE_5),
    "h100-pcie": _links(64, 200, _PCIE, _PCIE_5),
    "h100": _links(450, 400, _NVLINK, _PCIE_5),
    "h800": _links(200, 400, _NVLINK, _PCIE_5),
    "h20": _links(450, 400, _NVLINK, _PCIE_5),
    "a100-40gb": _links(300, 200, _NVLINK),
    "a100-pcie": _links(32, 200, _PCIE),
    "a100": _links(300, 200, _NVLINK),
    "a800": _links(200, 200, _NVLINK),
    "l40s": _links(32, 100, _PCIE),
    "l4": _links(32, 50, _PCIE),
    "910b": _links(196, 200, "HCCS of an eight-device server, seven links of 28 GB/s in one direction"),
    "910c": _links(196, 200, "one die's half of the package in the CloudMatrix384 paper (arXiv 2506.12708)"),
}
assert set(_LINKS) == {spec.key for spec in DEVICES}
