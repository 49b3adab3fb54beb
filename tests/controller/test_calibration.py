"""A finished run's files become factors of predicted times: twice as long spans, twice the factors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from typer.testing import CliRunner

import flowtrain
from flowtrain.cli.app import app
from flowtrain.config.load import dump_resolved, override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.calibration import CalibrationReport, _Run, _times_of, _traced, calibrate_runs
from flowtrain.controller.calibration_fit import WORK, Fit
from flowtrain.controller.calibration_pairs import JoinedPass, Pairs
from flowtrain.costs.action_times import ActionTimes
from flowtrain.costs.calibration import FEWEST, Calibration, DeviceTotal
from flowtrain.costs.flops import FloatArray
from flowtrain.costs.profile import read_profile
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import run_dir
from flowtrain.observability.trace import TraceWriter
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition, Stage
from flowtrain.types.messages import Span
from tests.e2e.worlds import World, tiny_config
from tests.profiles import cpu_profile

STEPS, STEP_S, MICROBATCHES = 10, 2.0, 3


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World(seed=3)
    world.add_mixed(32)
    return tiny_config(
        tmp_path,
        world.write(tmp_path / "data.parquet"),
        "done",
        model={"device": "emulated", "family": "variable_llava"},
        emulated={"device": "a100", "time_scale": 2.0},
    )


def write_run(
    config: RunConfig,
    longer: float = 1.0,
    last_longer: float = 1.0,
    stall: bool = False,
    actors: Sequence[str] = ("backbone-dp0-pp0-tp0",),
    joined_s: float = 0.0,
    late_s: float = 0.0,
    beside_s: float = 0.0,
    encode_at_s: float = 0.0,
    evaluated: int | None = None,
    first_traced: int = 0,
) -> Path:
    """Write what a run leaves. The devices' time is half of this machine's.

    longer: factor of all its spans. last_longer: further one of the last actor's. actors: of the backbone; each has the
    stage of its pipeline rank. joined_s: more of a step's first forward and last backward. late_s: the last actor
    begins so much later, and the others' last backward waits for it. beside_s: more of a step than its spans.
    encode_at_s: of an encoder's span, since the step began. evaluated: a step that an evaluation comes before.
    first_traced: of the steps.
    """
    root = run_dir(config).root
    root.mkdir(parents=True, exist_ok=True)
    run_dir(config).config.write_text(dump_resolved(config))
    lines, spans = [], []
    for step in range(STEPS):
        begin = 1000.0 + step * 2 * STEP_S
        line = {"step_time_s": STEP_S + beside_s, "starved_s": 0.5, "step": step + 1}
        lines.append({"timestamp": begin + 2 * STEP_S, **line})
        tokens = 60 + 10 * (step % 3)
        for actor in actors:
            at, stage = begin + 0.1 + late_s * (actor == actors[-1]), int(actor.partition("-pp")[2][0])
            for number in range(MICROBATCHES):
                for name, seconds in (("forward", 0.1), ("backward", 0.2)):
                    seconds *= longer * (last_longer if actor == actors[-1] else 1.0)
                    took = seconds * (20 if stall and step == 5 and number == 1 else 1)
                    took += joined_s * ((name, number) in (("forward", 0), ("backward", MICROBATCHES - 1)))
                    took += late_s * ((name, number) == ("backward", MICROBATCHES - 1) and actor != actors[-1])
                    args: dict[str, int | float | str] = {
                        "microbatch": number,
                        "module": "backbone",
                        "stage": stage,
                        "num_tokens": tokens,
                        "images": 0,
                    }
                    spans.append(Span(f"{actor} (emulated)", name, at, at + took, args))
                    at += took
            spans.append(Span(f"{actor} (emulated)", "optimizer", at, at + longer * 0.02, {"step": step + 1}))
            if step == evaluated:
                args = {"microbatch": 0, "module": "backbone", "stage": stage, "num_tokens": tokens, "images": 0}
                spans.append(Span(f"{actor} (emulated)", "forward", begin + 0.01, begin + 0.09, args))
        if step < first_traced:
            spans.clear()
            continue
        at = begin + encode_at_s
        spans.append(Span("encoder-0 (emulated)", "encode", at, at + longer * 0.3, {"images": 4, "unit": step}))
    run_dir(config).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    writer = TraceWriter(run_dir(config).trace)
    writer.write(spans)
    writer.close()
    return root


def factors(report: CalibrationReport) -> list[float]:
    found = report.calibration
    return [found.backbone, found.encoder("vision"), found.optimizer]


def test_an_update_is_compared_with_that_of_its_own_pipeline_rank(config: RunConfig) -> None:
    split = override_config(config, ["backbone.pipeline_parallel_size=2", "name=split"])
    found = []
    for rank in (0, 1):
        root = write_run(split, actors=[f"backbone-dp0-pp{rank}-tp0"])
        found.append(calibrate_runs([root]).calibration.optimizer)
        shutil.rmtree(root)
    assert found[0] != pytest.approx(found[1], rel=0.01), "the last rank has a head, the first one a connector"


def test_factors_are_in_proportion_to_the_spans_and_stalls_do_not_count(config: RunConfig) -> None:
    once = calibrate_runs([write_run(config)])
    assert all(each > 0.0 for each in factors(once)) and once.num_steps == STEPS - 1
    assert factors(calibrate_runs([write_run(config, longer=1.5)])) == pytest.approx(
        [1.5 * each for each in factors(once)]
    )
    assert factors(calibrate_runs([write_run(config, stall=True)]))[0] == pytest.approx(factors(once)[0], rel=0.05)
    # Of 2 s a step the devices compute 0.46 s and wait 0.5 s for data.
    assert once.calibration.step_host_s == pytest.approx(2.0 - 0.5 - (3 * 0.3 + 0.02) / 2.0)


def test_passes_that_always_take_longer_count(config: RunConfig) -> None:
    """A step's first forward and last backward are a third of its passes, and would be outliers by themselves."""
    plain, longer = (calibrate_runs([write_run(config, joined_s=each)]).calibration for each in (0.0, 0.3))
    took = MICROBATCHES * 0.3
    assert longer.backbone == pytest.approx(plain.backbone * (took + 2 * 0.3) / took)


def test_a_last_stage_that_takes_longer_tells_of_the_head(config: RunConfig) -> None:
    split = override_config(config, ["backbone.pipeline_parallel_size=2", "name=split"])
    actors = [f"backbone-dp0-pp{rank}-tp0" for rank in (0, 1)]
    found = [calibrate_runs([write_run(split, last_longer=each, actors=actors)]).calibration for each in (1.0, 1.2)]
    even, longer = (each.head / each.backbone for each in found)
    assert longer > 1.05 * even


def test_several_runs_are_one_fit(config: RunConfig) -> None:
    other = override_config(config, ["name=other"])
    one, two = (calibrate_runs([write_run(each, longer)]) for each, longer in ((config, 1.0), (other, 3.0)))
    roots = [run_dir(each).root for each in (config, other)]
    both = calibrate_runs(roots)
    assert both.num_steps == one.num_steps + two.num_steps and both.calibration.run == "done, other"
    low, middle, high = (factors(each) for each in (one, both, two))
    assert all(lower < mean < higher for lower, mean, higher in zip(low, middle, high, strict=True))


def test_runs_of_different_models_are_refused(config: RunConfig) -> None:
    wider = override_config(config, ["name=wider", "backbone.config.intermediate_size=160"])
    with pytest.raises(ConfigError, match=r"runs done and wider train different models \(backbone differ\)"):
        calibrate_runs([write_run(each) for each in (config, wider)])


def test_collectives_have_a_factor_of_their_own(config: RunConfig) -> None:
    two = override_config(config, ["backbone.data_parallel_size=2", "backbone.sharding=gradients"])
    actors = [f"backbone-dp{rank}-pp0-tp0" for rank in (0, 1)]

    def fitted(joined_s: float) -> Calibration:
        return calibrate_runs([write_run(two, actors=actors, joined_s=joined_s)]).calibration

    little, much = fitted(0.5), fitted(1.0)
    late = calibrate_runs([write_run(two, actors=actors, joined_s=0.5, late_s=0.3)]).calibration
    assert late.collectives == pytest.approx(little.collectives), "waits for the last rank are not theirs"
    assert little.backbone == much.backbone, "passes in the middle of a step have no collectives"
    assert much.collectives == pytest.approx(2.0 * little.collectives, rel=0.05)


def test_steps_after_an_evaluation_and_after_a_start_do_not_count(config: RunConfig) -> None:
    plain, evaluated, resumed = (
        calibrate_runs([write_run(config, **changes)]) for changes in ({}, {"evaluated": 4}, {"first_traced": 5})
    )
    assert (plain.num_steps, evaluated.num_steps, resumed.num_steps) == (9, 8, 4)
    assert factors(evaluated) == pytest.approx(factors(plain), rel=0.05)
    assert evaluated.calibration.step_host_s == pytest.approx(plain.calibration.step_host_s)


def test_a_word_for_the_partition_stands_for_its_numbers(config: RunConfig) -> None:
    changes = ["backbone.pipeline_parallel_size=2", "backbone.config.num_hidden_layers=4"]
    actors = [f"backbone-dp0-pp{rank}-tp0" for rank in (0, 1)]
    found = []
    for partition in ("[1,3]", "[3,1]", "balanced"):
        split = override_config(config, [*changes, f"pipeline.partition={partition}"])
        found.append(calibrate_runs([write_run(split, actors=actors)]).calibration.backbone)
        shutil.rmtree(run_dir(split).root)
    assert found[0] != found[1] and found[2] > 0.0


def test_a_profile_of_something_else_is_refused(config: RunConfig, tmp_path: Path) -> None:
    roots = [write_run(config)]
    other = override_config(config, ["emulated.device=h100", "name=other"])
    with pytest.raises(ConfigError, match=r"runs done and other ran on different devices \(a100 and h100\)"):
        calibrate_runs([*roots, write_run(other)])
    measured = tmp_path / "profile.json"
    measured.write_text(cpu_profile(config).to_json())
    with pytest.raises(ConfigError, match="device is 'cpu' there and 'a100' in this run"):
        calibrate_runs(roots, measured)


def test_the_ends_of_one_replicas_steps_tell_nothing_of_collectives() -> None:
    pairs = Pairs()
    for _ in range(FEWEST):
        pairs.stages.append(DeviceTotal(30.0, (6.0, 4.0), FEWEST, FEWEST))
        pairs.ends.append(JoinedPass(0.0, 3.0 + 5.0, 0.6, 0.4, 2.5))
    found = pairs.calibration("run", ["vision"])
    assert found.backbone == pytest.approx(3.0) and found.head == pytest.approx(3.0)
    assert found.ends == pytest.approx(2.0)
    assert found.collectives == 1.0


def test_where_every_pass_has_collectives_both_get_one_factor() -> None:
    passes = [JoinedPass(0.0, 3.0 * (number + 3), number, 2.0, 1.0) for number in range(9)]
    waiting = [replace(each, layers_s=each.layers_s - 0.5) for each in passes]
    pairs = Pairs(joined=list(zip(waiting, passes, strict=True)))
    found = pairs.calibration("run", ["vision"])
    assert found.backbone == found.head == found.collectives == found.ends == pytest.approx(3.0)
    assert found.encoder("vision") == 1.0
    pairs.joined.pop(), pairs.joined.pop()
    assert pairs.calibration("run", ["vision"]).collectives == 1.0, "too few say nothing"


def test_what_auto_became_is_read_from_the_runs_own_notes(config: RunConfig) -> None:
    two = override_config(config, ["backbone.data_parallel_size=2", "backbone.sharding=auto"])
    root = write_run(two, actors=[f"backbone-dp{rank}-pp0-tp0" for rank in (0, 1)], joined_s=0.5)
    before = calibrate_runs([root]).calibration
    note = {"event": "note", "text": "sharding: gradients (auto: whole parameters would take 0.1 GiB)"}
    run_dir(two).events.write_text(json.dumps(note) + "\n")
    after = calibrate_runs([root]).calibration
    run_dir(two).config.write_text(dump_resolved(override_config(two, ["backbone.sharding=gradients"])))
    assert before != after == calibrate_runs([root]).calibration


def test_what_overlaps_on_a_shared_device_counts_once(config: RunConfig) -> None:
    colocated = override_config(config, ["mode=colocated"])

    def fitted(encode_at_s: float) -> Calibration:
        return calibrate_runs([write_run(colocated, encode_at_s=encode_at_s)]).calibration

    beside, inside = fitted(3.0), fitted(0.2)
    for each in (beside, inside):
        assert each.collectives == each.backbone
        assert each.encoder("vision") == pytest.approx(each.backbone), "one total tells nothing of its parts"
    # Of 0.9 s of passes and 0.3 s of encoding, with the first inside of the second, 0.9 s are left.
    assert inside.backbone / beside.backbone == pytest.approx(0.9 / 1.2)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_the_host_has_what_a_steps_lists_leave(config: RunConfig, degrees: tuple[int, int]) -> None:
    dp, pp = degrees
    split = override_config(config, [f"backbone.data_parallel_size={dp}", f"backbone.pipeline_parallel_size={pp}"])
    actors = [f"backbone-dp{replica}-pp{rank}-tp0" for replica in range(dp) for rank in range(pp)]
    found = []
    for beside_s in (0.0, 0.25):
        report = calibrate_runs([root := write_run(split, actors=actors, beside_s=beside_s)])
        run, host_s = _Run.of(root), report.calibration.step_host_s
        fit = Fit(run.config, run.planned, replace(_times_of(run, None), profile=report.profile))
        rest = [fit.remainder_s(step) for step in _traced(run.files, run.config)]
        assert sum(each for each in rest if each is not None) == pytest.approx(0.0, abs=1e-6), "all is explained"
        # A step waits 0.5 s for data; passes of 0.45 s and an update of 0.01 s follow, a stage's after the one before.
        assert host_s == pytest.approx(STEP_S - 0.5 + beside_s - (0.45 + 0.15 * (pp - 1) + 0.01), rel=0.02)
        found.append(host_s)
    assert found[1] - found[0] == pytest.approx(0.25)
    if len(actors) > 1:
        alone = calibrate_runs([write_run(split, actors=actors[:1])]).calibration
        assert alone.step_host_s is None, "a rank's spans are missing"


def test_a_microbatchs_fetching_has_no_factor() -> None:
    stage = Stage(StageModule.BACKBONE, 0, 0, 0, range(2))
    later = Stage(StageModule.BACKBONE, 1, 0, 1, range(2, 4))
    fit: Any = SimpleNamespace(_partition=Partition((stage, later)), _actions=SimpleNamespace(microbatch_s=0.5))
    spans = [Span("rank", name, 0.0, 1.0, {"microbatch": number}) for number in (0, 1) for name in WORK[:2]]
    assert Fit._fetching_s(fit, stage, spans).tolist() == [0.5, 0.0, 0.5, 0.0], "each forward of the rank's first stage"
    assert not Fit._fetching_s(fit, later, spans).any()


def test_a_steps_first_backward_is_expected_to_take_less(config: RunConfig) -> None:
    run = _Run.of(write_run(config))
    fit = Fit(run.config, run.planned, _times_of(run, None))
    stage = fit._partition.stages[0]
    spans = _traced(run.files, run.config)[0].spans
    passes = [span for span in spans if span.name in WORK[:2]]
    before, head, none = fit._computing_s(stage, passes)
    with patch.object(ActionTimes, "first_backward_s", lambda times, work, backward: 0.25 * backward):
        after, same, saved = fit._computing_s(stage, passes)
    begin = [span.name for span in passes].index("backward")
    assert before[begin] > 0.0 and not none.any()
    assert (after.tolist(), same.tolist()) == (before.tolist(), head.tolist())
    assert saved[begin] == 0.25 * (before + head)[begin]
    assert np.count_nonzero(saved) == 1, "the others as they are"


def test_a_first_backward_hides_collectives_as_any_other(config: RunConfig) -> None:
    """As in the simulator: what it saves comes off what is left."""
    run = _Run.of(write_run(config))
    step = _traced(run.files, run.config)[0]

    def found(share: float) -> tuple[list[float], float]:
        fit, pairs, seen = Fit(run.config, run.planned, _times_of(run, None)), Pairs(), list[float]()

        def hidden_by(stage: Stage, spans: Sequence[Span], computing: FloatArray) -> FloatArray:
            seen.extend(computing.tolist())
            return np.zeros(len(spans))

        with (
            patch.object(ActionTimes, "first_backward_s", lambda times, work, backward: share * backward),
            patch.object(fit, "_collectives_s", hidden_by),
        ):
            assert fit.add(step, pairs)
        fit.end(pairs)
        return seen, sum(sum(total.parts_s) for total in (*pairs.stages, *pairs.devices))

    (whole, more_s), (same, less_s) = found(0.0), found(0.25)
    assert whole and same == whole
    assert less_s < more_s


def test_the_command_writes_a_profile_to_plan_with(config: RunConfig, tmp_path: Path) -> None:
    root = write_run(config)
    result = CliRunner().invoke(app, ["calibrate", str(root)])
    assert result.exit_code == 0, result.output
    assert "backbone, measured over predicted" in result.output
    profile = read_profile(run_dir(config).profile)
    assert profile.calibration is not None and profile.calibration.run == "done" and profile.device == "a100"
    emulated = config.model_copy(update={"mode": "llm_only"})
    rates = [
        flowtrain.plan(emulated, devices=2, device="a100", profile=each).rate
        for each in (None, run_dir(config).profile)
    ]
    assert rates[1] < rates[0], "these spans are far longer than an A100's"
    saved = tmp_path / "profile.json"
    again = CliRunner().invoke(app, ["calibrate", str(root), "--save", str(saved)])
    assert again.exit_code == 0 and read_profile(saved).calibration == profile.calibration


def test_a_runs_own_profile_of_another_version_does_not_hinder_a_given_one(config: RunConfig, tmp_path: Path) -> None:
    root, newer = write_run(config), tmp_path / "newer.json"
    assert CliRunner().invoke(app, ["calibrate", str(root), "--save", str(newer)]).exit_code == 0
    run_dir(config).profile.write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match=r"profile.json: schema is 1, .* then calibrate with --profile FILE"):
        calibrate_runs([root])
    assert calibrate_runs([root], newer).calibration == read_profile(newer).calibration


def test_what_says_nothing_is_refused(config: RunConfig, tmp_path: Path) -> None:
    root = write_run(config)
    run_dir(config).trace.unlink()
    with pytest.raises(
        ConfigError, match=r"has no whole step after the first that no evaluation .* observability.trace.steps=8"
    ):
        calibrate_runs([root])
    with pytest.raises(ConfigError, match="no run"):
        flowtrain.calibrate(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="name at least one"):
        flowtrain.calibrate()
    real = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"}), "emulated": None})
    with pytest.raises(ConfigError, match=r"run done: no data sheet and no measured times .*--profile FILE"):
        calibrate_runs([write_run(real)])
