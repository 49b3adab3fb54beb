"""What a configuration of emulated devices may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.emulated import check_resumes
from flowtrain.config.run import RunConfig
from flowtrain.controller.resolve import start_of
from flowtrain.emulation.check import check_emulated, check_emulated_profile, emulation_note, host_warning
from flowtrain.emulation.process import EmulatedRun
from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import family_from_config
from tests.e2e.worlds import tiny_config
from tests.profiles import write_cpu_profile


def config_of(tmp_path: Path, *overrides: str, **sections: Any) -> RunConfig:
    source = tmp_path / "data.parquet"
    source.touch()
    return tiny_config(tmp_path, source, "emulated", *overrides, **{"model": {"device": "emulated"}, **sections})


def test_the_section_needs_emulated_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"emulated has no effect with model\.device \('cpu'\)"):
        config_of(tmp_path, "emulated.device=h100", model={"device": "cpu"})


def test_emulated_devices_are_on_one_node_for_the_pool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.network \('nixl'\) joins nodes"):
        config_of(tmp_path, "pool.network=nixl")
    with pytest.raises(ConfigError, match=r"pool\.hbm_segment_nbytes"):
        config_of(tmp_path, "pool.hbm_segment_nbytes=1000")


def test_an_unknown_device_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"emulated\.device \(h20O\) is not in the table .* did you mean h20"):
        check_emulated(config_of(tmp_path, "emulated.device=h20O"))


def test_modules_can_be_on_other_devices_except_colocated(tmp_path: Path) -> None:
    config = config_of(tmp_path, "encoders.vision.accelerator_type=L40S", "emulated.device=h100")
    run = EmulatedRun.of(config)
    assert (run.device_type("vision").name, run.device_type("backbone").name) == ("l40s", "h100")
    note = emulation_note(config)
    assert note is not None and "h100 and l40s" in note and "no weights exist" in note


def test_a_run_without_weights_does_not_resume(tmp_path: Path) -> None:
    check_resumes(config_of(tmp_path), resume=False)
    with pytest.raises(ConfigError, match="--resume goes on from a checkpoint"):
        check_resumes(config_of(tmp_path), resume=True)
    with pytest.raises(ConfigError, match="--resume goes on from a checkpoint"):
        start_of(config_of(tmp_path), (), resume=True, plan=None)


def test_much_work_of_the_host_is_said() -> None:
    assert host_warning(None) is None and host_warning(0.1) is None
    assert host_warning(0.57) == (
        "the host's own work is 57% of a step, so rates are rather this machine's than the devices': raise "
        "emulated.time_scale, or use a larger model"
    )


def test_real_devices_say_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"device": "cpu"})
    check_emulated(config)
    assert emulation_note(config) is None and config.emulation is None


def test_a_profile_is_of_the_emulated_model(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_cpu_profile(profile, config_of(tmp_path))
    config = config_of(tmp_path, f"emulated.profile={profile}")
    spec = family_from_config(config).model_spec
    other = config.backbone.model_copy(update={"activation_checkpointing": "none"})
    check_emulated_profile(config.model_copy(update={"backbone": other}), spec)
    with pytest.raises(
        ConfigError, match=r"^emulated\.profile: .*model\.backbone\.num_layers is \d+ there and 77 in this"
    ):
        check_emulated_profile(config, replace(spec, backbone=replace(spec.backbone, num_layers=77)))


def test_a_profile_fits_whatever_is_frozen(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_cpu_profile(profile, config_of(tmp_path))
    config = config_of(tmp_path, f"emulated.profile={profile}", "model.freeze=[connector]")
    spec = family_from_config(config).model_spec
    assert spec.backbone.trained is not None
    check_emulated_profile(config, spec)
