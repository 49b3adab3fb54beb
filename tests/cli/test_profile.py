"""``flowtrain plan --profile`` and ``flowtrain profile``: rates from a file, what is refused, what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from flowtrain import api
from flowtrain.cli.app import app
from flowtrain.cli.profile import profile_tables
from flowtrain.controller.prepare import prepare
from flowtrain.controller.profiling import ProfileReport
from flowtrain.costs.profile import (
    MEASURE_AGAIN,
    DeviceFacts,
    ImageCosts,
    ImageTable,
    LengthTable,
    Profile,
    StepCosts,
    library_versions,
    model_facts,
)
from flowtrain.costs.profile_together import HostCosts, Interference, ReplicaCosts
from tests.cli.test_plan import record_of

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
LENGTHS = LengthTable((128, 512), (0.01, 0.02))


@pytest.fixture(scope="module")
def profile() -> Profile:
    """As if the quickstart had been measured on a node of four cores."""
    run_spec = prepare(api.resolve(QUICKSTART), check_pool=False)
    return Profile(
        device="cpu",
        facts=DeviceFacts(1e11, 2**33, 1e10, None, 4),
        model=model_facts(run_spec.config, run_spec.model_spec),
        versions=library_versions(),
        layers={1: LENGTHS},
        heads={1: LENGTHS},
        connectors={1: LENGTHS},
        encoders={"vision": {1: ImageTable((49,), (1, 8), ((0.01, 0.04),))}},
        images={"vision": ImageCosts(decode_s=0.005, batch_s=0.0)},
        steps=StepCosts(step_s=0.0, microbatch_s=0.0, parameter_s=0.0),
    )


@pytest.fixture
def saved(profile: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    return path


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *arguments])


def test_a_plan_takes_device_and_rates_from_the_profile(saved: Path) -> None:
    record = record_of(QUICKSTART, "--profile", str(saved), "--devices", "2")
    (device,) = record["devices"]
    assert (device["name"], device["devices_per_node"], device["memory_nbytes"]) == ("cpu", 4, 2**33)
    encoder, _ = record["allocation"]["modules"]
    # An image forwarded in batches of eight takes 5 ms, and 5 ms to decode; some samples have none, some several.
    workload = api.plan(QUICKSTART, devices=2, profile=saved).planned.workload
    images = float(workload.images["vision"][0].mean())
    assert encoder["production"] == pytest.approx(1 / (0.01 * images), rel=1e-6)
    text = plan(QUICKSTART, "--profile", str(saved), "--devices", "2").stdout
    assert "measured on cpu" in " ".join(text.split()) and "by data sheet" not in text


def test_images_decode_beside_an_accelerator(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(replace(profile, device="Some Accelerator").to_json())
    report = api.plan(QUICKSTART, devices=2, profile=path)
    images = float(report.planned.workload.images["vision"][0].mean())
    assert report.allocation.modules[0].production == pytest.approx(1 / (0.005 * images), rel=1e-6)
    slow = replace(profile, device="Some Accelerator", images={"vision": ImageCosts(decode_s=0.02, batch_s=0.0)})
    path.write_text(slow.to_json())
    for threads, seconds in ((1, 0.02), (2, 0.01)):
        found = api.plan(QUICKSTART, [f"encoders.vision.decode_threads={threads}"], devices=2, profile=path)
        assert found.allocation.modules[0].production == pytest.approx(1 / (seconds * images), rel=1e-6)


def test_the_profiled_device_may_be_named(saved: Path) -> None:
    named = record_of(QUICKSTART, "--profile", str(saved), "--devices", "2", "--device", "cpu")
    assert named["allocation"]["rate"] == pytest.approx(
        record_of(QUICKSTART, "--profile", str(saved), "--devices", "2")["allocation"]["rate"]
    )


AGAIN = "or use no profile (rates are then from data sheets)"


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            {},
            ("--device", "h200"),
            f"device is 'cpu' there and 'h200' in this run; {MEASURE_AGAIN}",
        ),
        (
            {},
            ("backbone.config.hidden_size=96",),
            "model.backbone.hidden_size is 192 there and 96 in this run",
        ),
        ({}, ("model.dtype=bfloat16",), "model.dtype is 'float32' there and 'bfloat16' in this run"),
        ({}, ("backbone.sequence_parallel=false",), "model.sequence_parallel is True there and False in this run"),
        ({}, ("backbone.num_threads=2",), "model.threads.backbone is 1 there and 2 in this run"),
        ({}, ("scheduler.microbatch_tokens=1024",), "layers.1 was measured up to 512, scheduler.microbatch_tokens is"),
        ({}, ("scheduler.microbatch_tokens=1024",), "profile again with scheduler.microbatch_tokens=1024, or use no"),
        ({"versions": {"torch": "1.0"}}, (), "versions.torch is '1.0' there and "),
        ({"schema": 9}, (), "schema is 9, this version reads 3"),
    ],
)
def test_a_profile_of_something_else_is_one_message_and_exit_code_2(
    saved: Path, change: dict[str, Any], arguments: tuple[str, ...], message: str
) -> None:
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **change}))
    result = plan(QUICKSTART, *arguments, "--devices", "2", "--profile", str(saved))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr and str(saved) in result.stderr and AGAIN in result.stderr


def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", QUICKSTART, "--save", str(tmp_path / "no" / "profile.json")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no directory" in result.stderr


def test_warnings_of_the_report_are_shown(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ProfileReport(profile, 2, {"backbone": 1.25}, ("the load average was 9.0",))
    monkeypatch.setattr(api, "profile", lambda config, overrides, **asked: report)
    saved = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["profile", QUICKSTART, "--save", str(saved)])
    assert result.exit_code == 0 and "warning: the load average was 9.0" in result.stdout
    assert "load average" not in saved.read_text()


def test_tables_show_what_was_measured_and_how_long_it_took(profile: Profile) -> None:
    shown = StringIO()
    console = Console(width=120, file=shown)
    several = replace(profile, layers={1: LENGTHS, 2: LENGTHS}, heads={1: LENGTHS, 2: LENGTHS})
    several = replace(several, connectors={1: LENGTHS, 2: LENGTHS})
    console.print(*profile_tables(ProfileReport(several, 2, {"backbone": 1.25}), Path("here.json")))
    text = shown.getvalue()
    for expected in ("2 x cpu", "49 patches", "8 a batch", "512 tokens", "tp=2", "backbone 1.2 s", "here.json"):
        assert expected in text


def test_what_processes_cost_each_other_is_shown_where_it_was_measured(profile: Profile) -> None:
    measured = replace(
        profile,
        interference={"vision": Interference((1.02, 1.25, 1.04))},
        replicas={"gradients": ReplicaCosts(0.0, 0.0, 0.025, 3e-9)},
        host=HostCosts(sample_s=0.0004, asking_s=0.0013, answering_s=0.0017),
    )
    texts = []
    for each in (profile, measured):
        shown = StringIO()
        console = Console(width=200, file=shown)
        console.print(*profile_tables(ProfileReport(each, 2, {}), Path("here.json")))
        texts.append(shown.getvalue())
    for expected in (
        "1.04 of the time",
        "1.02 to 1.25 in 3 rounds",
        "a step 25 ms and 3 ns a parameter",
        "0.4 ms to feed a sample",
    ):
        assert expected in texts[1] and expected not in texts[0]
