"""Device specs are found by the names that torch reports, and unknown ones are not guessed."""

import pytest

from flowtrain.costs.devices import DEVICES, device_spec


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Ascend910B3", "910b"),
        ("Ascend910_9362", "910c"),
        ("H200", "h200"),
    ],
)
def test_lookup_by_torch_name(name: str, key: str) -> None:
    spec = device_spec(name)
    assert spec is not None and spec.key == key


@pytest.mark.parametrize(
    "name", ["cpu", "", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H800 PCIe", "Tesla T4"]
)
def test_unknown_devices_are_not_guessed(name: str) -> None:
    assert device_spec(name) is None


def test_every_device_is_found_by_its_key_and_has_a_source() -> None:
    for spec in DEVICES:
        assert device_spec(spec.key) is spec and spec.source
        assert spec.peak_flops("bfloat16") == spec.bf16_flops
        assert spec.fp32_flops is None or spec.peak_flops("float32") < spec.bf16_flops
        # Slips of a power of ten: bytes that fit a known ratio of compute to bandwidth and memory.
        assert 20 < spec.bf16_flops / spec.bandwidth < 1000 and 10**10 < spec.memory_nbytes < 10**12
