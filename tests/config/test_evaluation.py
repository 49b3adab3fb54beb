"""Held-out sets, one or several by name, and the metric of the best checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.data import DataConfig, EvalConfig
from flowtrain.config.load import config_of_text, dump_resolved, load_config
from flowtrain.config.resume import check_resumable, config_digest
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TWO = "data.eval={shapes: {path: assets/shapes/eval.parquet}, clips: {path: assets/openclipart/eval.parquet}}"


def load(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


def test_one_set_has_the_name_eval() -> None:
    data = load().data
    assert list(data.eval_sets) == ["eval"] and data.eval_sets["eval"] is data.eval and data.eval_names == ("eval",)
    assert load("data.eval=null").data.eval_sets == {} and load("data.eval=null").data.eval_names == ()


def test_several_sets_keep_their_order_and_their_paths_are_found() -> None:
    data = load(TWO, "data.eval.clips.every_steps=25", "data.eval.clips.num_generated=3").data
    assert list(data.eval_sets) == ["shapes", "clips"] and data.eval_names == ("eval/shapes", "eval/clips")
    assert [each.every_steps for each in data.eval_sets.values()] == [100, 25]
    assert all(Path(each.path).is_absolute() for each in data.eval_sets.values())


@pytest.mark.parametrize("overrides", [(), (TWO,), ("data.eval=null",)])
def test_what_is_written_down_loads_again(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = load(*overrides)
    assert config_of_text(dump_resolved(config), tmp_path / "config.yaml") == config


def test_sets_can_be_given_as_objects() -> None:
    sets = {"a": EvalConfig(path="x"), "b": EvalConfig(path="y")}
    assert DataConfig(sources=({"path": "z"},), eval=sets).eval == sets  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.eval.evry_steps=3", "data.eval.evry_steps = 3: unknown key; did you mean data.eval.every_steps?"),
        ("data.eval={a: {path: assets/shapes, max_sample: 3}}", "did you mean data.eval.a.max_samples?"),
        ("data.eval={a: {every_steps: 3}}", "data.eval.a.path is missing; it is required"),
        ("data.eval={a: {path: assets/absent.parquet}}", "data.eval.a.path = 'assets/absent.parquet': no such file"),
        ("data.eval={}", "data.eval has 0 entries; it must have at least 1"),
        ("data.eval=3", "data.eval = 3: must be a section (a mapping of keys)"),
        ("data.eval={a/b: {path: assets/shapes}}", "data.eval: 'a/b' cannot name a held-out set"),
        ("data.eval.num_generated=-1", "data.eval.num_generated = -1: must be at least 0"),
        ("data.eval.max_new_tokens=0", "data.eval.max_new_tokens = 0: must be at least 1"),
    ],
)
def test_faults_name_the_key_as_it_is_written(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.eval=null", "checkpoint.keep_best=eval_loss"), "needs a held-out set; set data.eval"),
        (("checkpoint.keep_best=eval_los",), "must be one of eval_loss, eval_loss/eval; did you mean 'eval_loss'?"),
        ((TWO, "checkpoint.keep_best=eval_loss/clip"), "did you mean 'eval_loss/clips'?"),
        (
            (TWO, "data.eval.clips.every_steps=50", "checkpoint.every_steps=100", "checkpoint.keep_best=eval_loss"),
            "their every_steps differ (50, 100)",
        ),
        (
            ("checkpoint.every_steps=75", "checkpoint.keep_best=eval_loss"),
            "checkpoint.every_steps (75) is no multiple of the set's every_steps (50)",
        ),
    ],
)
def test_a_best_checkpoint_that_could_not_be_known_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("checkpoint.keep_best=eval_loss",),
        ("checkpoint.keep_best=eval_loss/eval", "checkpoint.every_steps=100"),
        (TWO, "checkpoint.every_steps=200", "checkpoint.keep_best=eval_loss"),
        (TWO, "data.eval.clips.every_steps=50", "checkpoint.every_steps=50", "checkpoint.keep_best=eval_loss/clips"),
    ],
)
def test_a_best_checkpoint_that_is_known_is_taken(overrides: tuple[str, ...]) -> None:
    assert load(*overrides).checkpoint.keep_best is not None


def test_a_resume_may_change_what_is_answered_and_which_checkpoint_is_best() -> None:
    for form in ((), (TWO, "checkpoint.every_steps=100")):
        key = "data.eval.clips" if form else "data.eval"
        old = load(*form)
        new = load(*form, f"{key}.num_generated=4", f"{key}.max_new_tokens=9", "checkpoint.keep_best=eval_loss")
        check_resumable(old, new)
        assert config_digest(old) == config_digest(new)
        with pytest.raises(ConfigError, match=f"{key}.max_samples"):
            check_resumable(old, load(*form, f"{key}.max_samples=3"))
