"""Values that would only fail once a run has started are refused with their key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.load import load_config
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import find_run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limits.stall_timeout_s=.inf", "limits.stall_timeout_s = inf: must be a finite number"),
        ("limits.stop_timeout_s=.nan", "limits.stop_timeout_s = nan: must be a finite number"),
        ("limits.placement_timeout_s=1e300", "limits.placement_timeout_s = 1e+300: must be at most 10000000.0"),
        ("limits.lease_timeout_s=1_000_000_000", "limits.lease_timeout_s = 1000000000: must be at most 10000000.0"),
        ("training.max_steps=99999999999999999999", "training.max_steps = 99999999999999999999: must be at most"),
        ("seed=18446744073709551616", "seed = 18446744073709551616: must be at most 9223372036854775808"),
        ("training.betas=[1.5,0.9]", "training.betas.0 = 1.5: must be less than 1"),
        ("backbone.num_threads=1_000_000", "backbone.num_threads = 1000000: must be at most 4096"),
        ("pool.max_segment_nbytes=70368744177664", "is more than an address space of 64 bits has for a tier"),
        ("runs_dir=~nosuchuser/x", "runs_dir = '~nosuchuser/x': ~nosuchuser is no user's home directory here"),
        ("data.sources.0.path=~nosuchuser/x", "data.sources.0.path = '~nosuchuser/x': ~nosuchuser is no user's"),
        ("model.tokenizer=~nosuchuser", "model.tokenizer = '~nosuchuser': ~nosuchuser is no user's home"),
        ("allocator.profile=~nosuchuser/p.json", "allocator.profile = '~nosuchuser/p.json': ~nosuchuser is no"),
        ('data.sources.0.path="a\\0b"', "no path has a NUL in it; take it out"),
        (f"name={'x' * 200}", "must be text of at most 128 characters"),
        (
            "backbone.config.hidden_size=100_000_000",
            "backbone.config.hidden_size = 100000000: must be an integer from 1",
        ),
        ("backbone.config.num_hidden_layers=-1", "backbone.config.num_hidden_layers = -1: must be an integer from 1"),
        ("backbone.config.num_hidden_layers=a", "backbone.config.num_hidden_layers = 'a': must be an integer from 1"),
        ("backbone.config.rms_norm_eps=.nan", "backbone.config.rms_norm_eps = nan: must be a finite number"),
        ("backbone.config.rope_parameters={a: [.inf]}", "backbone.config.rope_parameters.a.0 = inf: must be a finite"),
        ("backbone.config.model_type=[1]", "backbone.config.model_type = [1]: must be text"),
        ("encoders.vision.config.image_size=0", "encoders.vision.config.image_size = 0: must be pixels from 1"),
        ("encoders.vision.image_processor.size={height: -1}", "encoders.vision.image_processor.size = {'height': -1}"),
        (
            "backbone.config={model_type: qwen3, hidden_size: 1000000, num_hidden_layers: 4000}",
            "make 8.0e+15 parameters or more; a module can have 1e+14: lower them",
        ),
        ("a." * 400 + "b=1", "401 names with dots"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [override])
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_areas_of_processors_of_natural_resolution_are_no_sides(minimal: Path) -> None:
    size = "encoders.vision.image_processor={size: {shortest_edge: 65536, longest_edge: 16777216}}"
    assert load_config(minimal, [size]).encoders["vision"].image_processor["size"]["longest_edge"] == 16777216


def test_a_configuration_or_a_run_in_nobodys_home_is_refused() -> None:
    for read in (load_config, find_run):
        with pytest.raises(ConfigError, match="~nosuchuser is no user's home directory here"):
            read("~nosuchuser/run.yaml")
