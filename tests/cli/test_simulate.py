"""``flowtrain simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain.allocator.mode_reasons import AS_FAST, SIMPLER
from flowtrain.cli.app import app
from flowtrain.costs.profile_together import HostCosts
from tests.profiles import cpu_profile

MODELS = Path(__file__).parents[2] / "configs" / "models"
QUICKSTART = MODELS.parent / "quickstart.yaml"
SMALL = (str(MODELS / "vlm_6b.yaml"), "--devices", "16")


def simulate(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["simulate", *arguments])


def record_of(*arguments: str) -> dict[str, Any]:
    result = simulate(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


def test_all_modes_stand_side_by_side_the_fastest_first() -> None:
    modes = record_of(*SMALL, "--compare")["modes"]
    assert {each["mode"] for each in modes} == {"llm_only", "decoupled", "disaggregated", "colocated", "monolithic"}
    *rates, _ = [each["rate"] for each in modes]
    assert rates == sorted(rates, reverse=True) and modes[-1]["mode"] == "llm_only", "the bound is last"
    for each in modes:
        # The formula has even microbatches; it is close where there is no pipeline.
        assert each["rate"] == pytest.approx(each["rate_formula"], rel=0.1)
        assert 0.0 < each["mfu"] < 0.68, "of which 0.68 is assumed to be reached in matrix products"
        assert 0.0 <= each["starved"] < 1.0 and 0.0 <= each["bubble"] < 1.0
        flow = each["flow"]
        assert set(flow["blocked_s"]) == (set() if each["mode"] in ("llm_only", "monolithic") else {"vision"})
        assert flow["pool_mean_nbytes"] <= flow["pool_peak_nbytes"] <= flow["pool_nbytes"]
        assert flow["lost"] == {"encode_s": 0.0, "num_remade": 0}


def test_the_module_that_sets_the_rate_is_named() -> None:
    def limited_by(source: str, *changes: str) -> str:
        (mode,) = record_of(source, *changes, "--mode", "decoupled")["modes"]
        return str(mode["limited_by"])

    few = (str(QUICKSTART), "--devices", "2", "--device", "h200")
    assert limited_by(*few) == "feeder"
    text = " ".join(simulate(*few, "--mode", "decoupled").stdout.split())
    assert "feeders they set the rate of decoupled (2): each reads 400 samples/s" in text
    even = (*SMALL, "allocator.method=even")
    assert limited_by(*even) == "backbone", "half of the devices are too many for the encoder"
    losses = [f"--lose=vision@{second}+90000" for second in range(1, 8)]
    assert limited_by(*even, *losses, "--lose=vision@120+60") == "vision", "one is left, and then none for a minute"
    assert limited_by(*even, "--lose=feeder@120+60") == "feeder"
    assert limited_by(str(MODELS / "vlm_72b.yaml"), "--devices", "256", "allocator.choose=all") == "vision"


def test_nothing_is_cut_on_a_narrow_terminal() -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["simulate", *SMALL, "--compare"])
    assert result.exit_code == 0 and "…" not in result.stdout
    assert "limited by" in result.stdout and "colocated: shared devices" in " ".join(result.stdout.split())


def test_modes_that_are_as_fast_are_named() -> None:
    report = flowtrain.simulate(MODELS / "vlm_6b.yaml", ["mode=auto"], devices=16)
    rates = {mode.rating.mode: mode.rate for mode in report.modes if mode.rating.mode != "llm_only"}
    fast = [mode for mode, rate in rates.items() if rate >= AS_FAST * max(rates.values())]
    told = [note for note in report.notes if "are as fast" in note]
    assert len(told) == (len(fast) > 1)
    assert all(f"{', '.join(fast)} are as fast" in note for note in told)
    assert all(f"with mode=auto flowtrain plan takes {report.planning.winner.mode}, " in note for note in told)
    slow = flowtrain.simulate(QUICKSTART, ["mode=auto"], devices=2, device="h200")
    assert {mode.limited_by for mode in slow.modes} == {"feeder"}, "so all are as fast, and in the order of simplicity"
    assert [mode.rating.mode for mode in slow.modes] == [*SIMPLER, "llm_only"]
    (note,) = (note for note in slow.notes if "are as fast" in note)
    assert note.endswith(f"with mode=auto flowtrain plan takes {slow.planning.winner.mode}, by its own rates")
    assert slow.planning.winner.mode != SIMPLER[0]


def test_one_mode_is_simulated_by_itself() -> None:
    record = record_of(*SMALL, "--mode", "monolithic")
    assert [each["mode"] for each in record["modes"]] == ["monolithic"]


def test_the_table_has_a_chart_of_one_step() -> None:
    result = simulate(*SMALL, "--mode", "decoupled")
    assert (result.exit_code, result.stderr) == (0, "")
    (chart,) = (line for line in result.stdout.splitlines() if line.startswith("rank 0"))
    assert {"▀", "▄"} <= set(chart)


def test_a_trace_has_every_forward_and_backward_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    result = simulate(*SMALL, "--mode", "decoupled", "--trace", str(path))
    assert result.exit_code == 0, result.output
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    forwards = {(each["pid"], each["name"].split()[1]) for each in events if each["name"].startswith("forward")}
    backwards = {(each["pid"], each["name"].split()[1]) for each in events if each["name"].startswith("backward")}
    assert forwards == backwards and len(forwards) == len(events) / 2
    assert all(each["dur"] > 0 for each in events)


def test_a_page_shows_the_modes_and_a_step(tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    result = simulate(*SMALL, "--compare", "--html", str(path))
    assert result.exit_code == 0 and f"page: {path}" in result.stderr
    text = path.read_text()
    modes = [each["mode"] for each in record_of(*SMALL, "--compare")["modes"]]
    assert len(modes) > 1 and all(f">{mode}<" in text for mode in modes)
    assert all(f'class="bar k-{name}"' in text for name in ("forward", "backward"))
    assert ">rank 0<" in text and "optimizer state" in text
    assert "<script" not in text and "http://" not in text.replace("http://www.w3.org", "")


def test_the_memory_of_each_rank_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    (mode,) = record_of(*SMALL, "--mode", "decoupled", "--trace", str(path))["modes"]
    peaks, kinds = mode["rank_peak_nbytes"], mode["rank_memory"]
    assert peaks == [sum(each.values()) for each in kinds]
    # Packed microbatches are at most as full as those that the planner counts with.
    assert max(peaks) == pytest.approx(mode["peak_nbytes"]["backbone"], rel=0.1)
    counters = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "C"]
    assert {each["name"] for each in counters} == {f"memory of rank {rank}" for rank in range(len(peaks))}
    assert max(each["args"]["GiB"] for each in counters) <= max(peaks) / 2**30
    text = simulate(*SMALL, "--mode", "decoupled").stdout
    assert "the fullest is rank 0" in text and "optimizer state" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--steps", "1"), "num_steps (--steps) is 1; it must be at least 2"),
        (("--trace", "step.txt"), "--trace step.txt: the ending must be .json"),
        (("--html", "step.htm"), "--html step.htm: the ending must be .html"),
        (("--mode", "fast"), "fast"),
        (("--mode", "decoupled", "--compare"), "leave one out"),
        (("--lose", "vision"), "losses (--lose) has 'vision'; write MODULE@SECONDS"),
        (("--lose", "audio@3"), "losses (--lose) names 'audio', and the run has vision, feeder"),
        (("--encoder-spread", "-1"), "encoder_spread (--encoder-spread) is -1.0; it must be 0 or more"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments: tuple[str, ...], expected: str) -> None:
    result = simulate(*SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in " ".join(result.stderr.split())


def test_python_gets_what_the_command_prints() -> None:
    report = flowtrain.simulate(MODELS / "vlm_6b.yaml", ["training.global_batch_size=256"], devices=16, num_steps=4)
    (first, *_) = report.modes
    assert first.rate == pytest.approx(256 / first.run.step_s)
    assert len(first.run.steps) >= 4


def test_lost_and_uneven_encoders_slow_a_run() -> None:
    asked = (*SMALL, "--mode", "decoupled", "training.global_batch_size=256")
    (quiet,) = record_of(*asked)["modes"]
    (hit,) = record_of(*asked, "--lose", "vision@5+60", "--lose", "feeder@6", "--encoder-spread", "0.5")["modes"]
    assert hit["flow"]["lost"]["encode_s"] > 0.0 and hit["flow"]["lost"]["num_remade"] > 0
    assert hit["flow"]["starved_s"] > quiet["flow"]["starved_s"]


def test_a_loss_that_changes_nothing_is_named() -> None:
    asked = (*SMALL, "training.global_batch_size=256")
    record = record_of(*asked, "--mode", "decoupled", "--lose", "vision@99999", "--lose", "feeder@1")
    (note,) = (note for note in record["notes"] if "changes nothing" in note)
    assert note.startswith("--lose vision@99999 changes nothing: the simulated steps end after ")
    record = record_of(*asked, "--mode", "monolithic", "--lose", "vision@1")
    assert "--lose vision@1 changes nothing: no simulated mode has actors of vision" in record["notes"]


def test_a_segment_that_is_given_is_not_raised() -> None:
    given = "encoders.vision.segment_nbytes=402653184"
    (mode,) = record_of(*SMALL, "--mode", "decoupled", given)["modes"]
    assert mode["degrees"]["vision"] == "dp=2 pp=1 tp=1" and mode["flow"]["pool_nbytes"] == 2 * 402653184


def test_large_batches_are_simulated_by_a_part_of_the_replicas() -> None:
    # Packed in parts, which need not hold whole groups of shards.
    changes = ("training.global_batch_size=5000", "backbone.sharding=hybrid", "allocator.choose=[chunks]")
    record = record_of(str(MODELS / "vlm_6b.yaml"), *changes, "--devices", "80", "--mode", "decoupled")
    (mode,) = record["modes"]
    assert mode["rate"] == pytest.approx(mode["rate_formula"], rel=0.15)


def test_one_device_carries_both_sides() -> None:
    # As fast as it is planned: encoder and backbone take turns, and neither has a device of its own.
    # By data sheets that is tens of thousands of samples/s, so it takes many feeders.
    feeding = ["data.num_feeders=256", "training.global_batch_size=512"]
    changes = ["mode=decoupled", "allocator.choose=[]", *feeding]
    report = flowtrain.simulate(QUICKSTART, changes, devices=1, device="h200")
    (mode,) = report.modes
    assert mode.rate == pytest.approx(mode.rating.rate, rel=0.02)
    assert mode.rating.devices == 1 and mode.mfu < 0.68
    assert report.notes == ()


def test_on_cpus_the_runs_own_processes_take_their_share(tmp_path: Path) -> None:
    config = flowtrain.api.resolve(QUICKSTART, ["mode=monolithic"])
    without = cpu_profile(config)
    host, modes = HostCosts(sample_s=0.001, asking_s=0.001, answering_s=0.001), []
    for each in (without, replace(without, host=host)):
        path = tmp_path / "profile.json"
        path.write_text(each.to_json())
        report = flowtrain.simulate(config, profile=path, devices=2)
        modes.append(report.modes[0])
    assert modes[0].host_s == 0.0 and modes[1].host_s > 0.0
    assert modes[1].step_s == pytest.approx(modes[0].step_s + modes[1].host_s)
    assert modes[1].rate == pytest.approx(modes[1].rating.rate, rel=0.05), "as it is planned"


def test_what_a_simulated_search_leaves_out_is_named() -> None:
    changes = ["mode=decoupled", "allocator.choose=[]", "pipeline.policy=pipetune", "backbone.accelerator_type=H200"]
    report = flowtrain.simulate(QUICKSTART, changes, devices=1, device="h200")
    assert report.as_record()["notes"] == list(report.notes) and "searches take no time" in report.notes[-1]


def test_steps_of_other_degrees_than_the_configurations_are_named() -> None:
    def notes(*changes: str) -> tuple[str, ...]:
        return flowtrain.simulate(QUICKSTART, ["mode=monolithic", *changes], devices=2, device="h200").notes

    assert notes("backbone.data_parallel_size=2") == ()
    (note,) = notes("backbone.pipeline_parallel_size=2")
    assert (
        "the plan of monolithic changes the backbone's degrees" in note and "backbone.pipeline_parallel_size=1" in note
    )
