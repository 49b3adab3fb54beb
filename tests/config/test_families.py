"""Keys that a family does not read are refused when the file is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.load import dump_resolved, load_config, load_resolved
from flowtrain.errors import ConfigError, FaultCode

FAMILY = "model.family=qwen3_vl"


@pytest.mark.parametrize(
    ("override", "key", "value", "default"),
    [
        ("encoders.vision.feature_layer=-1", "encoders.vision.feature_layer", "-1", "-2"),
        ("encoders.vision.feature_select=full", "encoders.vision.feature_select", '"full"', "null"),
        ("connector.hidden_act=relu", "connector.hidden_act", '"relu"', '"gelu"'),
        ("connector.bias=false", "connector.bias", "false", "true"),
    ],
)
def test_a_key_without_effect_is_refused(minimal: Path, override: str, key: str, value: str, default: str) -> None:
    load_config(minimal, [override])
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [FAMILY, override])
    (fault,) = caught.value.faults
    assert (fault.key, fault.code) == (key, FaultCode.CONFLICT)
    assert fault.text == (
        f"{key} ({value}) has no effect with model.family 'qwen3_vl', whose Hugging Face class decides it; leave the "
        f"key out (its default is {default})"
    )


def test_the_file_and_its_line_are_named(minimal: Path) -> None:
    text = minimal.read_text().replace(
        "    config: {model_type: siglip", "    feature_layer: -1\n    config: {model_type: siglip"
    )
    minimal.write_text(text + "model: {family: qwen3_vl}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml(?s:.*)encoders\.vision\.feature_layer \(-1\) has no effect"):
        load_config(minimal)


def test_a_resolved_configuration_has_all_keys_and_is_no_fault(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, [FAMILY])
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert "feature_layer" in (tmp_path / "resolved.yaml").read_text()
    assert load_resolved(tmp_path / "resolved.yaml") == config
