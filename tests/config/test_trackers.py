"""Which trackers a configuration may name, and with which options."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.load import dump_resolved, load_config, load_resolved
from flowtrain.errors import ConfigError


def test_names_paths_and_options_are_kept(minimal: Path, tmp_path: Path) -> None:
    overrides = [
        "observability.trackers=[tensorboard, my.board:Board]",
        "observability.tracker_options={tensorboard: {logdir: boards}, 'my.board:Board': {colour: red}}",
    ]
    config = load_config(minimal, overrides, check_paths=False)
    assert config.observability.trackers == ("tensorboard", "my.board:Board")
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_resolved(config))
    assert load_resolved(file) == config


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "trackers=[tensorbord]",
            r"observability.trackers.0 = 'tensorbord': must be one of tensorboard, wandb, mlflow",
        ),
        ("trackers=['os.system']", r"or a class of your own as package.module:Class"),
        ("trackers=['a:b:c']", r"package.module:Class"),
        ("trackers=[mlflow, mlflow]", r"observability.trackers names 'mlflow' twice; take one of them out"),
        (
            "tracker_options={wandb: {project: cats}}",
            r"tracker_options.wandb is given, but observability.trackers \(none\) does not name 'wandb'; add it there",
        ),
    ],
)
def test_what_is_refused(minimal: Path, override: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_config(minimal, [f"observability.{override}"], check_paths=False)


@pytest.mark.parametrize("option", ["api_key", "token", "tracking_password", "aws_access_key"])
def test_an_option_that_looks_like_a_secret_is_refused_without_its_value(minimal: Path, option: str) -> None:
    overrides = [
        "observability.trackers=[wandb]",
        f"observability.tracker_options={{wandb: {{{option}: hunter2hunter2}}}}",
    ]
    with pytest.raises(ConfigError, match=rf"tracker_options.wandb.{option} looks like a secret") as caught:
        load_config(minimal, overrides, check_paths=False)
    assert "WANDB_API_KEY" in str(caught.value) and "hunter2" not in str(caught.value.faults)
