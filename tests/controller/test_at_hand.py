"""The devices at hand, from what Ray counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flowtrain import api
from flowtrain.config.run import RunConfig
from flowtrain.controller.at_hand import UNKNOWN_TYPE, DevicesAtHand, by_type, emulated, of_machine
from flowtrain.controller.planning.devices import AskedDevices, SizedType, cluster_of
from flowtrain.costs.profile import configured_profile
from flowtrain.errors import ConfigError
from tests.profiles import cpu_profile

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
H200 = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H200": 1.0}
A100 = {"CPU": 32.0, "GPU": 4.0, "accelerator_type:A100": 1.0}


def config_of(*overrides: str) -> RunConfig:
    return api.resolve(QUICKSTART, ["mode=auto", *overrides])


def test_accelerators_count_by_type_and_node() -> None:
    found = by_type([H200, {"CPU": 16.0}, A100, H200], config_of())
    assert found == (SizedType("H200", 16, 8), SizedType("A100", 4, 4))
    half = {**H200, "GPU": 4.0}
    assert by_type([H200, half], config_of()) == (SizedType("H200", 12, 4),), "a tensor parallel group fits each node"
    assert by_type([{"GPU": 2.0}], config_of()) == (SizedType(UNKNOWN_TYPE, 2, 2),)


def test_without_accelerators_the_cores_of_a_rank_are_a_device() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 3.0}, {"object_store_memory": 1.0}]
    assert by_type(nodes, config_of()) == (SizedType("cpu", 11, 3),)
    assert by_type(nodes, config_of("backbone.num_cpus=2")) == (SizedType("cpu", 5, 1),)
    assert by_type(nodes, config_of("backbone.num_cpus=0.1")) == (SizedType("cpu", 11, 3),)
    assert by_type([H200], config_of("model.device=cpu")) == (SizedType("cpu", 64, 64),)


def test_fewer_devices_can_be_asked_for() -> None:
    found = DevicesAtHand((SizedType("H200", 16, 8),), "the Ray cluster")
    assert found.only(None) is found and found.text == "16 H200 of the Ray cluster"
    assert found.only(4).sized == (SizedType("H200", 4, 4),) and found.only(12).sized == (SizedType("H200", 12, 8),)
    with pytest.raises(ConfigError, match=r"--devices \(17\) is more than there are: 16 H200 of the Ray cluster"):
        found.only(17)
    several = DevicesAtHand((*found.sized, SizedType("A100", 4, 4)), "the Ray cluster")
    with pytest.raises(ConfigError, match=r"--devices \(4\) does not tell of which type: there are 16 H200 and 4 A100"):
        several.only(4)


def test_a_machine_has_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    found = of_machine(config_of("model.device=cpu"))
    assert (found.sized, found.where) == ((SizedType("cpu", 6, 6),), "this machine")


def test_of_emulated_devices_there_are_as_many_as_are_asked_for() -> None:
    kind = ("model.device=emulated", "emulated.device=h100", "emulated.devices_per_node=4")
    config = config_of(*kind, "emulated.devices=8")
    assert config.emulation is not None
    assert emulated(config, config.emulation, 16).sized == (SizedType("h100", 16, 4),)
    assert emulated(config, config.emulation, None).sized == of_machine(config).sized == (SizedType("h100", 8, 4),)
    config = config_of(*kind)
    assert config.emulation is not None
    assert emulated(config, config.emulation, None).sized == (SizedType("h100", 3, 3),), "two encoders and a rank"


def test_emulated_devices_of_a_profile_are_those_it_was_measured_on() -> None:
    profile = Path(__file__)
    config = config_of("model.device=emulated", f"emulated.profile={profile}", "emulated.devices=8")
    found = of_machine(config)
    assert found.sized == (SizedType(None, 8, 8),) and found.text == "8 measured devices of an emulated cluster"
    with pytest.raises(ConfigError, match=r"^emulated\.profile: .*test_at_hand\.py is not a profile file"):
        configured_profile(config)


def test_a_profile_is_not_used_for_several_types() -> None:
    config = config_of()
    asked = AskedDevices(at_hand=(SizedType("H200", 16, 8), SizedType("A100", 4, 4)))
    message = r"measured on one type of devices, and there are 2 \(H200, A100\); .* without allocator\.profile"
    with pytest.raises(ConfigError, match=message):
        cluster_of(asked, SimpleNamespace(config=config), cpu_profile(config))  # type: ignore[arg-type]


def test_emulated_devices_are_of_one_type() -> None:
    kind = ("model.device=emulated", "emulated.device=h200", "emulated.devices=8")
    assert of_machine(config_of(*kind, "backbone.accelerator_type=H200")).sized == (SizedType("h200", 8, 8),)
    message = r"encoders\.vision\.accelerator_type \(L40S\) is not emulated\.device \(h200\)"
    with pytest.raises(ConfigError, match=message):
        of_machine(config_of(*kind, "encoders.vision.accelerator_type=L40S"))
