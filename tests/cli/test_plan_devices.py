"""``flowtrain plan`` on several types of devices, of several encoders, on one device; and its plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowtrain
from flowtrain import api
from flowtrain.allocator.plan import fixed_plan, read_plan
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.run_plan import ModulePlan
from tests.cli.test_plan import MODELS, QUICKSTART, SPLIT, plan, record_of, refused

SMALL = str(MODELS / "vlm_6b.yaml")
APART = "mode=decoupled"
BOTH = ("--device", "h200=64", "--device", "910b=4x8")


def modules_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {module["name"]: module for module in record["modes"][0]["modules"]}


def test_several_types_are_planned_together(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    # 240 samples leave the backbone 60 of the fast devices, too few others for encoders: they go to the slow ones.
    arguments = (SMALL, "training.global_batch_size=240", *BOTH, APART)
    record = record_of(*arguments, "--save", str(saved))
    assert [(each["name"], each["count"], each["devices_per_node"]) for each in record["devices"]] == [
        ("h200", 64, 8),
        ("910b", 32, 8),
    ]
    found = modules_of(record)
    assert found["backbone"]["device_type"] == "h200" and found["vision@910b"]["device_type"] == "910b"
    text = plan(*arguments).stdout
    assert f"{found['vision@910b']['devices']} 910b" in text and f"{found['backbone']['devices']} h200" in text
    chosen = read_plan(saved)
    assert (chosen.encoders["vision"].accelerator_type, chosen.backbone.accelerator_type) == ("Ascend910B", "H200")
    assert "backbone.accelerator_type=H200" in record["overrides"]
    assert record["allocation"]["rate"] > record_of(*arguments[:2], APART, "--device", "h200=64")["allocation"]["rate"]


def list_sample(workload: dict[str, Any], text_tokens: int, images: dict[str, list[int]]) -> None:
    """Put one sample in place of a model file's mixture."""
    del workload["mixture"]
    sample = {"text_tokens": text_tokens, "target_tokens": 8192, "images": images}
    workload |= {"global_batch_size": 256, "fill": 1.0, "samples": [sample]}


def test_an_encoder_lies_on_one_type_although_two_would_be_faster(tmp_path: Path) -> None:
    heavy = tmp_path / "heavy.yaml"
    values = yaml.safe_load((MODELS / "vlm_6b.yaml").read_text())
    list_sample(values["workload"], 64, {"vision": [3584, 3584]})
    values["backbone"]["num_hidden_layers"] = 8
    heavy.write_text(yaml.safe_dump(values))
    arguments = (str(heavy), APART, "--device", "h200=16", "--device", "a100=2")
    record = record_of(*arguments)
    found, (note,) = record["allocation"], [note for note in record["notes"] if "several types" in note]
    assert len(modules_of(record)) == 2 and found["rate_added"] > found["rate"]
    assert note.startswith("with an encoder's replicas on several types of devices at once it would be ")
    saved = tmp_path / "plan.yaml"
    plan(*arguments, "--save", str(saved))
    assert read_plan(saved).encoders["vision"].accelerator_type in ("H200", "A100")
    assert record_of(*arguments[:4])["allocation"]["rate_added"] is None, "one type"


def test_a_level_keeps_the_solution_of_the_level_before() -> None:
    """Of these devices HiGHS called the last level infeasible, with tolerances as wide as the pins."""
    chunked = ("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2")
    devices = ("--device", "h20=7x16", "--device", "l4=5", "--device", "h100=2x1")
    record = record_of(str(MODELS / "omnibal_6b_20b.yaml"), APART, *chunked, *devices, "--solver", "highs")
    assert len(record["allocation"]["alternatives"]) == 3


@pytest.mark.parametrize("count", [2, 3])
def test_several_encoders_are_planned_although_no_run_takes_them(tmp_path: Path, count: int) -> None:
    values = yaml.safe_load((MODELS / "vlm_6b.yaml").read_text())
    names = ["near", "wide", "dots"][:count]
    values["encoders"] = dict.fromkeys(names, values["encoders"]["vision"])
    list_sample(values["workload"], 256, {name: [3584] for name in names})
    values["workload"]["microbatch_tokens"] = 16384
    file = tmp_path / "several.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    record = record_of(str(file), APART, "--devices", "64")
    assert list(modules_of(record)) == [*names, "backbone"]
    assert any(f"a run refuses this plan: encoders has {count} entries" in note for note in record["notes"])
    (fault,) = flowtrain.plan(file, [APART], devices=64).faults
    assert (fault.key, fault.code) == ("encoders", FaultCode.ENCODERS)
    said = "saved; first fix what the notes name, then start it with"
    assert said in plan(str(file), APART, "--devices", "64", "--save", str(tmp_path / "plan.yaml")).stdout


def test_a_run_with_several_encoders_is_refused_before_it_starts() -> None:
    config = api.resolve(QUICKSTART)
    encoder = config.encoders["vision"].model_dump()
    several = type(config).model_validate(config.model_dump() | {"encoders": {"vision": encoder, "sound": encoder}})
    message = r"encoders has 2 entries \(vision, sound\); family 'llava' has exactly one encoder"
    for start in (flowtrain.train, flowtrain.dry_run, flowtrain.plan):
        with pytest.raises(ConfigError, match=message):
            start(several)


def test_one_device_is_shared_and_a_run_takes_its_half(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    record = record_of(QUICKSTART, "--devices", "1", "--save", str(saved))
    found = record["allocation"]
    assert found["shared"] is True and found["devices"] == 1 and found["rate_apart"] > found["rate"]
    text = plan(QUICKSTART, "--devices", "1").stdout
    assert "on 1 of 1 device, shared" in text and "encoders and backbone share the one device" in text
    chosen = read_plan(saved)
    assert chosen.is_shared and chosen.encoders["vision"].num_devices == chosen.backbone.num_devices == 0.5
    assert fixed_plan(api.resolve(QUICKSTART, plan=saved)) == chosen
    assert fixed_plan(api.resolve(QUICKSTART, record["overrides"])) == chosen
    # What a cluster without accelerators sees of it is what it sees of the configuration.
    without = flowtrain.dry_run(QUICKSTART, [f"runs_dir={tmp_path}"], plan=chosen).run.plan.without_devices()
    assert chosen.feeder == ModulePlan(), "one feeder for a device; a run sizes its segment by its data"
    assert without.feeder.segment_nbytes > 0
    assert replace(without, feeder=chosen.feeder) == fixed_plan(api.resolve(QUICKSTART, plan=saved)).without_devices()
    assert without.encoders["vision"].num_devices == without.backbone.num_devices == 0.0


@pytest.mark.parametrize(("devices", "share"), [(1, 0.5), (3, 1.0)])
def test_shares_of_the_configuration_are_not_shared_again(devices: int, share: float) -> None:
    shared = ("encoders.vision.num_devices=0.5", "backbone.num_devices=0.5")
    plan = api.plan(QUICKSTART, shared, devices=devices).plan
    assert (plan.encoders["vision"].num_devices, plan.backbone.num_devices) == (share, share)


def test_a_cpu_is_shared_by_its_cores_time(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    record_of(QUICKSTART, "--devices", "1", "model.device=cpu", "encoders.vision.num_cpus=1", "--save", str(saved))
    chosen = read_plan(saved)
    assert chosen.encoders["vision"].num_cpus == chosen.backbone.num_cpus == 0.5
    assert chosen.backbone.num_devices == 0.0


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_a_picture(tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"rate.{ending}"
    result = plan(*SPLIT, "--plot", str(picture))
    assert (result.exit_code, result.stderr) == (0, f"plot: {picture}\n")
    content = picture.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
    else:
        again = tmp_path / "again.svg"
        plan(*SPLIT, "--plot", str(again))
        assert b"<svg" in content and content == again.read_bytes(), "the same plan is the same picture"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h200", "--device", "910b"), "--device names several types (h200, 910b): give each its number"),
        (("--device", "h200=8", "--device", "910b"), "--device (910b) has no number, but others have one"),
        (("--device", "h200=0"), "give NAME=COUNT or NAME=NODESxDEVICES with numbers from 1"),
        (("--device", "h200=8x"), "give NAME=COUNT or NAME=NODESxDEVICES with numbers from 1"),
        (("--device", "h200=8", "--devices", "8"), "says how many there are, and so does --devices; drop one"),
        (("--device", "h200=8", "--nodes", "1"), "says how many there are, and so does --nodes; drop one"),
        (("--device", "h200=8", "--device", "h200=4"), "--device names h200 more than once"),
        (("--device", "h200=8", "--device", "h20o=4"), "--device (h20o) is not in the table of devices"),
        (("--device", "h200=8", "--plot", "rate.jpg"), "--plot rate.jpg: the ending must be .png or .svg"),
        (("--device", "h200=8", "--plot", "none/rate.png"), "--plot none/rate.png: there is no directory none"),
        (("--device", "l4=1", "--device", "a100=1"), "feasible with 2 l4 and 2 a100"),
        (
            ("--device", "h200=1", "--device", "l4=1", "encoders.vision.max_batch_patches=1000000"),
            "(1 h200, 1 l4) hold each module alone but not all of them together; the nearest feasible choice: 1 h200",
        ),
        (("--device", "h200=2000000"), "ask for 2000000 devices; plan at most 1048576"),
        (
            ("--device", "cpu", "--devices", "2"),
            "--device (cpu) has no data sheet here; measure it",
        ),
    ],
)
def test_devices_that_make_no_sense_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(SMALL, APART, *arguments)
    assert not Path("rate.png").exists()


def test_what_cannot_be_drawn_is_shown_and_saved_all_the_same(tmp_path: Path) -> None:
    picture, saved = tmp_path / "rate.png", tmp_path / "plan.yaml"
    result = plan(SMALL, APART, *BOTH, "--plot", str(picture), "--save", str(saved))
    assert result.exit_code == 2 and "samples/s" in result.stdout
    assert "there is no choice of splits to draw" in result.stderr
    assert read_plan(saved).backbone.num_actors > 1 and not picture.exists()


@pytest.mark.parametrize("asked", [{"devices": 0}, {"devices": 8, "nodes": 0}, {"nodes": -1}])
def test_no_devices_at_all_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(devices|nodes) \(--\1\) is (0|-1); it must be at least 1"):
        flowtrain.plan(SMALL, **asked)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_qwen3_32b_fits_on_eight_nodes(device: str, tmp_path: Path) -> None:
    saved, model = tmp_path / "plan.yaml", str(MODELS / "vlm_32b.yaml")
    record = record_of(model, APART, "--device", f"{device}=8x8", "--save", str(saved))
    backbone = modules_of(record)["backbone"]
    assert backbone["degrees"]["tp"] <= 8 and backbone["peak_nbytes"] <= backbone["memory_nbytes"]
    memory, chosen = backbone["memory"], read_plan(saved)
    computing = memory["accumulated"] + memory["gathered"] + memory["activations"] + memory["working"]
    assert backbone["peak_nbytes"] == memory["parameters"] + memory["optimizer_state"] + computing
    assert chosen.gradient_reduction == backbone["gradient_reduction"] and chosen.hybrid_shard_size is None
    text = plan(model, APART, "--device", f"{device}=8x8").stdout
    assert "memory of a backbone rank, GiB" in text and f"{backbone['peak_nbytes'] / 2**30:.2f}" in text
    # Replicas of one device each fit only with a reduction each microbatch; no plan needs more than a node for tp.
    flat = record_of(model, APART, "--device", f"{device}=8x8", "backbone.gradient_reduction=microbatch")
    assert flat["allocation"]["num_candidates"]["backbone"] >= record["allocation"]["num_candidates"]["backbone"]


def test_hybrid_groups_are_planned_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    settings = ("backbone.sharding=hybrid", "backbone.sequence_parallel=false", "training.global_batch_size=16")
    record = record_of(SMALL, APART, "--device", "h200=2x8", *settings, "--save", str(saved))
    backbone, chosen = modules_of(record)["backbone"], read_plan(saved)
    degrees = backbone["degrees"]
    assert degrees["dp"] > 1 and chosen.hybrid_shard_size == backbone["num_shards"]
    assert degrees["dp"] % backbone["num_shards"] == 0
    assert backbone["num_shards"] * degrees["pp"] * degrees["tp"] <= 8
    assert f"backbone.hybrid_shard_size={chosen.hybrid_shard_size}" in record["overrides"]
    fewer = record_of(SMALL, APART, "--device", "h200=2x8", *settings, "backbone.hybrid_shard_size=2")
    assert modules_of(fewer)["backbone"]["num_shards"] == 2
    assert not [note for note in fewer["notes"] if "refuses this plan: backbone.hybrid_shard_size" in note]
