"""Peak figures of accelerators, from public data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GB = 10**9
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device type."""

    key: str
    """Short name for ``--device``."""
    pattern: str
    """Regular expression for the device name that torch reports; case does not matter."""
    bf16_flops: float
    """Dense peak in FLOP/s."""
    fp32_flops: float | None
    """Dense peak in FLOP/s, IEEE single precision without TF32; None if no public figure is known."""
    memory_nbytes: int
    """Of the device memory."""
    bandwidth: float
    """Of the device memory, in bytes/s."""
    source: str
    """Source of the figures."""

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for a compute dtype, ``bfloat16`` or ``float32``."""
        return {"bfloat16": self.bf16_flops, "float32": self.fp32_flops}[dtype]


_H100 = "NVIDIA H100 data sheet; bf16 is half of the figure with sparsity"
_A100 = "NVIDIA A100 data sheet"
_ASCEND_B = (
    "bf16: the figure that verl and VeOmni compute MFU with (the 910B's variants lie around it); "
    "memory and bandwidth: one die in the CloudMatrix384 paper (arXiv 2506.12708)"
)

# More special names first: the first pattern that matches wins.
DEVICES: tuple[DeviceSpec, ...] = (
    DeviceSpec("b200", r"\bB200\b", 2250e12, 75e12, 180 * _GB, 7.7e12, "NVIDIA HGX B200 data sheet, an eighth of it"),
    DeviceSpec("h200-nvl", r"\bH200 NVL\b", 835.5e12, 60e12, 141 * _GB, 4.8e12, "NVIDIA H200 data sheet (NVL)"),
    DeviceSpec("h200", r"\bH200\b", 989.5e12, 67e12, 141 * _GB, 4.8e12, "NVIDIA H200 data sheet (SXM)"),
    DeviceSpec("h100-nvl", r"\bH100 NVL\b", 835.5e12, 60e12, 94 * _GB, 3.9e12, _H100),
    DeviceSpec("h100-pcie", r"\bH100 PCIe\b", 756.5e12, 51e12, 80 * _GB, 2.0e12, _H100),
    DeviceSpec("h100", r"\bH100\b", 989.5e12, 67e12, 80 * _GB, 3.35e12, _H100),
    DeviceSpec("h800", r"\bH800\b(?! PCIe)", 989.5e12, 67e12, 80 * _GB, 3.35e12, "as the H100 SXM, with slower NVLink"),
    DeviceSpec("h20", r"\bH20\b", 148e12, 44e12, 96 * _GB, 4.0e12, "NVIDIA H20 data sheet"),
    DeviceSpec("a100-40gb", r"\bA100-[A-Z0-9]+-40GB\b", 312e12, 19.5e12, 40 * _GB, 1.555e12, _A100),
    DeviceSpec("a100-pcie", r"\bA100 80GB PCIe\b", 312e12, 19.5e12, 80 * _GB, 1.935e12, _A100),
    DeviceSpec("a100", r"\bA100\b", 312e12, 19.5e12, 80 * _GB, 2.039e12, _A100),
    DeviceSpec("a800", r"\bA800\b", 312e12, 19.5e12, 80 * _GB, 2.039e12, "as the A100 80GB, with slower NVLink"),
    DeviceSpec("l40s", r"\bL40S\b", 362e12, 91.6e12, 48 * _GB, 0.864e12, "NVIDIA L40S data sheet"),
    DeviceSpec("l4", r"\bL4\b", 121e12, 30.3e12, 24 * _GB, 0.3e12, "NVIDIA L4 data sheet"),
    DeviceSpec("910b", r"Ascend910B", 354e12, None, 64 * _GIB, 1.6e12, _ASCEND_B),
    DeviceSpec(
        "910c",
        r"Ascend910_93",
        376e12,
        None,
        64 * _GIB,
        1.6e12,
        "one of the two dies of a package; torch counts each die as a device; CloudMatrix384 paper (arXiv 2506.12708)",
    ),
)


def device_spec(name: str) -> DeviceSpec | None:
    """Return the spec for a short key (``h200``) or for a device name as torch reports it (``NVIDIA H200``).

    None if the device is not in the table, for example a CPU or a slice of a GPU (MIG); a run then measures its peak.
    """
    for spec in DEVICES:
        if name.lower() == spec.key:
            return spec
    if re.search(r"\bMIG\b", name):
        return None
    return next((spec for spec in DEVICES if re.search(spec.pattern, name, re.IGNORECASE)), None)
