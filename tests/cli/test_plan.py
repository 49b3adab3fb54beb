"""``flowtrain plan``: what it prints and saves, that a run takes what it saved, and what it refuses."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain import api
from flowtrain.allocator.plan import fixed_plan, read_plan
from flowtrain.allocator.program.solvers import installed_solvers
from flowtrain.cli.app import app
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.flow.members import Members
from tests.cli.test_cli import flowtrain_command

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
MODELS = REPOSITORY / "configs" / "models"
MODELS_6B = str(MODELS / "vlm_6b.yaml")
PAPER = (str(MODELS / "vlm_72b.yaml"), "--devices", "256", "--device", "910b")
SPLIT = (*PAPER, "mode=decoupled")
"""The paper's setting in the paper's mode."""


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["plan", *arguments])


def record_of(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


def refused(*arguments: str) -> str:
    result = plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


def test_the_papers_setting_prints_what_its_page_shows() -> None:
    result = plan(*PAPER)
    assert (result.exit_code, result.stderr) == (0, "")
    page = (REPOSITORY / "docs" / "allocator.md").read_text()
    shown = {line.rstrip() for line in page.splitlines()}
    *lines, command = (line.rstrip() for line in result.stdout.splitlines())
    assert len([line for line in lines if line.startswith("search")]) == 1
    for line in lines:
        assert not line or line.startswith("search") or f"    {line}" in shown, line
    assert command in " ".join(page.replace("\\\n", "").split()), "which the page folds"
    assert "…" not in result.stdout, "a table is cut"


def test_where_nothing_fits_the_page_shows_what_is_said() -> None:
    message = refused(
        str(MODELS / "vlm_6b.yaml"),
        *("--devices", "4", "--device", "a100"),
        *("mode=decoupled", "backbone.activation_checkpointing=none", "scheduler.microbatch_tokens=32768"),
    )
    page = (REPOSITORY / "docs" / "allocator.md").read_text()
    assert " ".join(message.split()) in " ".join(page.split())


def test_json_says_what_the_text_says() -> None:
    record, text = record_of(*SPLIT), " ".join(plan(*SPLIT).stdout.split())
    encoder, backbone = record["modes"][0]["modules"]
    for value in (f"{backbone['production']:.4g}", f"{encoder['mfu']:.1%}", *record["overrides"], *record["notes"]):
        assert value in text
    assert backbone["devices"] == backbone["degrees"]["dp"] * backbone["degrees"]["pp"] * backbone["degrees"]["tp"]
    assert f"backbone.pipeline_parallel_size={backbone['degrees']['pp']}" in record["overrides"]
    assert record["assumptions"]["efficiency"]["matmul"] == 0.68
    found = record["workload"]
    assert f"{record['tokens_per_s']:,.0f} tokens/s" in text and f"batch {found['global_batch_size']:,} samples" in text
    assert record["tokens_per_s"] == pytest.approx(record["rate"] * found["tokens_per_sample"])
    assert record["pool"]["features_nbytes"] > 0


def test_all_modes_are_in_one_table_and_the_first_one_starts() -> None:
    record, shown = record_of(*PAPER), plan(*PAPER).stdout
    text, modes = " ".join(shown.split()), {each["mode"]: each for each in record["modes"]}
    assert set(modes) == {"decoupled", "colocated", "monolithic", "disaggregated", "llm_only"}
    winner, *others = record["modes"]
    assert record["mode"] == record["plan"]["mode"] == winner["mode"] and winner["of_best"] == 1.0
    assert f"mode={winner['mode']}" in record["overrides"], "the configuration leaves it open"
    for each in record["modes"]:
        assert f"\n {each['mode']} " in shown and each["reason"] in text
        if each["rate"] is not None:
            assert f"{each['rate']:.4g}" in text and f"{each['tokens_per_s']:,.0f}" in text
            assert f"{each['of_best']:.1%}" in text and each["settings"]["microbatch_tokens"] > 0
    rates = [each["rate"] for each in others if each["rate"] is not None and each["mode"] != "llm_only"]
    shown_rates = [float(f"{rate:.4g}") for rate in rates]
    assert shown_rates == sorted(shown_rates, reverse=True) and all(rate * 0.995 <= winner["rate"] for rate in rates)
    settings = record["plan"]["backbone_settings"]
    assert settings == winner["settings"] and f"checkpointing {settings['activation_checkpointing']}" in text
    assert "(assumed)" in text, "how encoder and backbone slow each other down was not measured"
    *_, line = shown.splitlines()
    assert line.startswith("RAY_ADDRESS=auto flowtrain train CONFIG ") and f" mode={winner['mode']} " in line


@pytest.mark.parametrize("mode", ["decoupled", "colocated", "monolithic", "disaggregated"])
def test_a_mode_alone_is_planned_as_configured(mode: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    arguments = (QUICKSTART, f"mode={mode}", "--devices", "4", "--save", str(saved))
    record = record_of(*arguments)
    assert [each["mode"] for each in record["modes"]] == [mode] and record["pool"]["fault"] is None
    assert (record["allocation"] is not None) == (mode in ("decoupled", "disaggregated"))
    chosen = read_plan(saved)
    assert chosen.mode == mode and chosen.backbone_settings is None, "nothing else is chosen"
    assert any(note.startswith(f"only mode {mode!r} was planned") for note in record["notes"])
    for overrides in ([], ["mode=auto"], [f"mode={mode}"]):
        resolved = api.resolve(QUICKSTART, overrides, plan=saved)
        assert resolved.mode == mode and resolved.scheduler.microbatch_tokens == 512
        found = replace(fixed_plan(resolved), encoder_layers=chosen.encoder_layers)
        assert found == chosen
    shown = plan(*arguments).stdout
    assert "of best" not in shown and f"mode {mode}: " in " ".join(shown.split())
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["train", QUICKSTART, "mode=auto", f"runs_dir={tmp_path / 'runs'}", "--plan", str(saved), "--dry-run"]
    )
    assert result.exit_code == 0 and f"{mode}, float32" in result.stdout, result.stderr


def test_without_images_a_plan_is_the_bound() -> None:
    record = record_of(QUICKSTART, "mode=llm_only", "--devices", "4")
    assert record["mode"] == "llm_only" and record["plan"]["encoders"] == {}
    other = record_of(QUICKSTART, "mode=auto", "allocator.choose=[]", "--devices", "4")
    assert other["mode"] != "llm_only" and other["rate"] <= record["rate"] * 1.001


def test_a_trained_encoder_leaves_one_mode() -> None:
    trained = ("encoders.vision.trainable=true", "mode=auto")
    record = record_of(QUICKSTART, *trained, "--devices", "4")
    fitting = [each["mode"] for each in record["modes"] if each["rate"] is not None]
    assert record["mode"] == "monolithic" and set(fitting) <= {"monolithic", "llm_only"}
    assert any("only monolithic trains an encoder" in each["reason"] for each in record["modes"])


def test_settings_that_overrides_set_are_not_chosen() -> None:
    asked = (QUICKSTART, "mode=auto", "--devices", "2")
    kept = record_of(*asked, "backbone.activation_checkpointing=full", "scheduler.microbatch_tokens=640")
    for each in kept["modes"]:
        assert each["settings"]["microbatch_tokens"] == 640
        assert each["settings"]["activation_checkpointing"] in (None, "full")
    alone = record_of(*asked, "allocator.choose=[]")
    assert all(each["settings"] is None for each in alone["modes"])
    assert alone["rate"] <= record_of(*asked)["rate"] * 1.005


@pytest.mark.parametrize("solver", installed_solvers())
def test_every_installed_solver_can_be_asked_for(solver: str) -> None:
    found, reference = record_of(*SPLIT, "--solver", solver)["allocation"], record_of(*SPLIT)["allocation"]
    assert found["solver"] == solver
    assert found["rate"] == pytest.approx(reference["rate"]) and found["devices"] == reference["devices"]


def test_a_model_file_is_planned_without_heavy_libraries(tmp_path: Path) -> None:
    code, output, error, heavy = flowtrain_command("plan", *PAPER, cwd=tmp_path)
    assert (code, error) == (0, "")
    assert not {"torch", "ray", "transformers"} & set(heavy)
    assert "of best" in output and list(tmp_path.iterdir()) == []


def test_settings_of_a_model_file_can_be_changed() -> None:
    record = record_of(*SPLIT, "training.global_batch_size=240", "backbone.sharding=gradients")
    assert record["workload"]["global_batch_size"] == 240
    assert record["assumptions"]["setup"]["sharding"] == "gradients"
    assert "override 'backbone.config.num_hidden_layers=4': for a model file only settings" in refused(
        *PAPER, "backbone.config.num_hidden_layers=4"
    )


def test_a_run_is_planned_and_takes_the_plan_that_was_saved(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    devices = ("--devices", "4", "--nodes", "2")
    record = record_of(QUICKSTART, *devices, "scheduler.lookahead_steps=1", "--save", str(saved))
    assert record["devices"][0]["devices_per_node"] == 2
    assert record["source"] == "run quickstart: the first 50 of 240 steps"
    chosen = read_plan(saved)
    degrees = {module["name"]: module["degrees"] for module in record["allocation"]["modules"]}
    for name, module in (("vision", chosen.encoders["vision"]), ("backbone", chosen.backbone)):
        assert vars_of(module.degrees) == degrees[name]
    assert degrees["backbone"]["dp"] > 1, "the same as the configuration's"
    assert chosen.network == "auto"
    for resolved in (
        api.resolve(QUICKSTART, plan=saved),
        api.resolve(QUICKSTART, record["overrides"]),  # the overrides that are printed do the same
    ):
        assert replace(fixed_plan(resolved), network=resolved.pool.network) == chosen
    # Later overrides win.
    assert api.resolve(QUICKSTART, ["backbone.data_parallel_size=1"], plan=saved).backbone.data_parallel_size == 1
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["train", QUICKSTART, f"runs_dir={tmp_path / 'runs'}", "--plan", str(saved), "--dry-run"]
    )
    assert result.exit_code == 0, result.stderr
    assert f"{degrees['backbone']['dp']} data" in result.stdout


def vars_of(degrees: Any) -> dict[str, int]:
    return {"dp": degrees.dp, "pp": degrees.pp, "tp": degrees.tp}


def test_a_run_has_as_many_devices_as_its_own_degrees_take() -> None:
    report = flowtrain.plan(QUICKSTART, ["backbone.data_parallel_size=4"])
    assert report.cluster.num_devices == 6 and report.allocation.devices <= 6
    assert report.planned.workload.lengths.max() <= 512


def test_notes_say_what_a_run_would_refuse_or_wait_for() -> None:
    ahead = ["scheduler.lookahead_steps=200"]
    report = flowtrain.plan(QUICKSTART, ahead, devices=2)
    (note,) = [note for note in report.notes if note.startswith("the pool holds less")]
    enough = int(note.split("segment_nbytes=")[1].split()[0])
    report = flowtrain.plan(QUICKSTART, [*ahead, f"encoders.vision.segment_nbytes={enough}"], devices=2)
    assert not [note for note in report.notes if note.startswith("the pool")]
    assert report.pool.segments_nbytes >= report.pool.features_nbytes


def test_feeders_that_a_rate_leaves_out_are_noted() -> None:
    def told(*changes: str) -> list[str]:
        report = flowtrain.plan(QUICKSTART, changes, devices=2)
        return [note for note in report.notes if "samples/s, and the rate needs" in note]

    (one,), (two,) = told("data.num_feeders=1"), told()
    assert one.startswith("1 feeder reads 400 samples/s") and two.startswith("2 feeders read 800 samples/s")
    assert told("data.num_feeders=200") == []


def test_a_pool_that_a_run_refuses_is_raised_to_what_it_takes(tmp_path: Path) -> None:
    overrides = ["encoders.vision.segment_nbytes=65536", "scheduler.lookahead_steps=1", "data.max_seq_len=512"]
    report = flowtrain.plan(QUICKSTART, overrides, devices=2)
    nbytes = report.plan.encoders["vision"].segment_nbytes
    assert report.pool.fault is None
    note = next(note for note in report.notes if "segment_nbytes" in note)
    assert note.startswith(f"encoders.vision.segment_nbytes is raised from 65536 to {nbytes}: ")
    # What it says is taken, as overrides or as the plan itself, and nothing smaller is.
    others = [f"runs_dir={tmp_path}", *overrides[1:]]
    changes = [*others, *report.overrides]
    assert flowtrain.dry_run(QUICKSTART, changes) == flowtrain.dry_run(QUICKSTART, others, plan=report.plan)
    with pytest.raises(ConfigError, match="segment_nbytes to at least") as caught:
        flowtrain.dry_run(QUICKSTART, [*changes, f"encoders.vision.segment_nbytes={nbytes - 1}"])
    assert [(fault.key, fault.code) for fault in caught.value.faults] == [
        ("encoders.vision.segment_nbytes", FaultCode.POOL)
    ]


def test_interleaved_pipelines_are_faster_where_fill_is_much(tmp_path: Path) -> None:
    values = yaml.safe_load(Path(PAPER[0]).read_text())
    values["workload"] = {
        "global_batch_size": 256,
        "microbatch_tokens": 8192,
        "samples": [{"text_tokens": 1024, "target_tokens": 8192, "images": {"vision": [3584, 3584]}}],
    }
    file = tmp_path / "even.yaml"
    file.write_text(yaml.safe_dump(values))
    even = (str(file), *PAPER[1:], "mode=decoupled")
    plain = record_of(*even)
    interleaved = record_of(*even, "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2")
    assert interleaved["allocation"]["rate"] > plain["allocation"]["rate"], "less fill is faster here"


def test_interleaved_pipelines_are_planned_as_they_run() -> None:
    chunked = ("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2")
    interleaved = record_of(*SPLIT, *chunked)
    assert interleaved["assumptions"]["chunks_per_rank"] == 2
    assert interleaved["modes"][0]["modules"][-1]["degrees"]["pp"] >= 2
    assert not [note for note in interleaved["notes"] if "refuses" in note or "modelled" in note]


@pytest.mark.parametrize(("method", "how"), [("even", "half and half"), ("flops", "in proportion to FLOPs")])
def test_an_ablation_is_noted(method: str, how: str) -> None:
    asked = (MODELS_6B, "--devices", "32", "mode=decoupled")
    best, found = record_of(*asked), record_of(*asked, f"allocator.method={method}")
    note = next(note for note in found["notes"] if note.startswith(f"allocator.method ({method!r}) gave this plan"))
    assert f"devices are split {how}" in note and f"milp would give {best['allocation']['rate']:.4g} samples/s" in note
    assert found["allocation"]["method"] == method and best["allocation"]["method"] == "milp"
    assert not [note for note in best["notes"] if "allocator.method" in note]


@pytest.mark.parametrize("counts", [None, [1, 3]])
def test_a_given_partition_is_noted(counts: list[int] | None, tmp_path: Path) -> None:
    """The quickstart has one device a module, so the plan has no pipeline."""
    keys = [] if counts is None else [f"pipeline.partition={counts}", "backbone.pipeline_parallel_size=2"]
    notes = record_of(QUICKSTART, f"runs_dir={tmp_path}", *keys, "--devices", "2")["notes"]
    found = [note for note in notes if note.startswith("pipeline.partition is for backbone.pipeline_parallel_size 2")]
    assert len(found) == (counts is not None)
    assert all("start it with pipeline.partition=null" in note for note in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PAPER[:3], "--device", "h20o"), "--device (h20o) is not in the table of devices; take one of b200"),
        ((*PAPER[:3], "--device", "h20o"), "; did you mean h20"),
        ((*PAPER, "--solver", "cplex"), "--solver (cplex) is not installed; installed: "),
        ((*PAPER, "--nodes", "30"), "take 240 or 270 devices"),
        ((*PAPER[:1], "--devices", "3", "--nodes", "8"), "take 8 devices"),
        (PAPER[:1], "model file vlm_72b has no degrees that tell a number of devices; give --devices or --nodes"),
        (
            (*PAPER[:1], "--devices", "8", "--device", "910b", "mode=decoupled"),
            "does not fit the device memory, the smallest needs",
        ),
        ((*PAPER[:1], "--devices", "8", "--device", "910b", "mode=decoupled"), "feasible with "),
        ((*PAPER, "scheduler.microbatch_tokens=4096"), "is larger than scheduler.microbatch_tokens (4096)"),
        (
            (str(MODELS / "vlm_6b.yaml"), "--devices", "1", "--device", "a100", "mode=decoupled"),
            "backbone has no feasible configuration (on 1 a100: does not fit the device memory",
        ),
        (
            (*PAPER[:1], "--devices", "2", "--device", "l4"),
            "mode monolithic: does not fit",
        ),
        ((*PAPER, "allocator.method=even"), "is an ablation of mode 'decoupled'"),
        ((*PAPER, "allocator.choose=[chunk]"), "did you mean 'chunks'?"),
        ((QUICKSTART, "--device", "910b"), "no public peak for model.dtype (float32)"),
        ((QUICKSTART, "training.learning_rat=1"), "did you mean training.learning_rate?"),
        ((*PAPER, "training.global_batch_sizes=128"), "did you mean training.global_batch_size?"),
        ((*PAPER, "training.learning_rate=1"), "for a model file only settings that decide its plan can be overridden"),
        ((*PAPER, 'model.freeze=["*mlp*"]'), "has no parameters' names; name modules (connector, backbone)"),
        ((QUICKSTART, 'model.freeze=["*embed_token.*"]'), "matches no parameter's whole name; the nearest are"),
        (("none.yaml",), "none.yaml: the configuration cannot be read"),
        ((*PAPER, "--save", "nowhere/plan.yaml"), "--save nowhere/plan.yaml: there is no directory nowhere; create it"),
        (
            (*PAPER[:1], "--devices", "1", "mode=decoupled", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"),
            "backbone has no feasible configuration (on 1 h200: no pipeline, which several chunks a rank need)",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_a_plan_that_a_run_cannot_take_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    with pytest.raises(ConfigError, match=r"plan.yaml: the plan cannot be read"):
        api.resolve(QUICKSTART, plan=saved)
    record_of(str(MODELS / "vlm_6b.yaml"), "--devices", "16", "mode=decoupled", "--save", str(saved))
    text = saved.read_text()
    saved.write_text(text.replace("vision:", "sound:"))
    with pytest.raises(ConfigError, match=rf"with the plan {saved}: .*encoders"):
        api.resolve(QUICKSTART, plan=saved)
    saved.write_text(text.replace("num_cpus", "num_cpu", 1))
    with pytest.raises(
        ConfigError, match=r"plan.yaml: .*num_cpu = .*: unknown key; did you mean encoders.vision.num_cpus"
    ):
        api.resolve(QUICKSTART, plan=saved)
    saved.write_text('{"schema": 1, "device": "cpu"}')
    with pytest.raises(ConfigError, match=r"plan.yaml: this is not a plan, which has encoders, backbone and feeder"):
        api.resolve(QUICKSTART, plan=saved)


def test_a_fault_that_is_there_without_the_plan_is_not_the_plans(tmp_path: Path) -> None:
    chosen = fixed_plan(api.resolve(QUICKSTART))
    wide = replace(chosen, backbone=replace(chosen.backbone, data_parallel_size=64))
    for overrides in (["seed=-1"], ["backbone=7"], ["seed"]):
        with pytest.raises(ConfigError) as without:
            api.resolve(QUICKSTART, overrides)
        with pytest.raises(ConfigError) as caught:
            api.resolve(QUICKSTART, overrides, plan=wide)
        assert str(caught.value) == str(without.value)
    said = r"training.global_batch_size \(16\) is smaller than backbone.data_parallel_size \(64\)"
    with pytest.raises(ConfigError, match=f"^with the plan given: .*quickstart.yaml: {said}") as caught:
        flowtrain.dry_run(QUICKSTART, [f"runs_dir={tmp_path}"], plan=wide)
    assert [fault.key for fault in caught.value.faults] == ["backbone.data_parallel_size"]


def test_a_plan_and_overrides_may_put_right_what_the_file_alone_is_refused_for(tmp_path: Path) -> None:
    chosen, file = fixed_plan(api.resolve(QUICKSTART)), tmp_path / "run.yaml"
    file.write_text(Path(QUICKSTART).read_text().replace("backbone:\n", "backbone:\n  data_parallel_size: 32\n"))
    with pytest.raises(ConfigError, match="some ranks would never"):
        api.resolve(file, check_paths=False)
    assert fixed_plan(api.resolve(file, check_paths=False, plan=chosen)) == chosen
    wide = replace(chosen, backbone=replace(chosen.backbone, data_parallel_size=64))
    again = ["backbone.data_parallel_size=2"]
    assert api.resolve(file, again, check_paths=False, plan=wide).backbone.data_parallel_size == 2


def test_a_saved_plan_says_how_it_is_started(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    given = ("--devices", "4", "--save", str(saved))
    changed = ("backbone.data_parallel_size=4", "model.freeze=[connector]", "encoders.vision.segment_nbytes=65536")
    *_, line = plan(QUICKSTART, *changed, *given).stdout.splitlines()
    assert line == f"flowtrain train {QUICKSTART} 'model.freeze=[connector]' --plan {saved}", "one line, as it is typed"
    *_, line = plan(MODELS_6B, "mode=decoupled", "--devices", "8", "--save", str(saved)).stdout.splitlines()
    assert line.startswith("flowtrain train CONFIG model.dtype=bfloat16 backbone.activation_checkpointing=full ")
    assert line.endswith(f" --plan {saved}"), "with all settings that the file's plan takes for granted"


@pytest.mark.parametrize(
    ("devices", "per_node", "num_nodes"), [(("--devices", "64"), 8, 8), (("--devices", "16", "--nodes", "1"), 16, 1)]
)
def test_a_plan_for_several_nodes_sets_what_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], per_node: int, num_nodes: int
) -> None:
    saved = tmp_path / "plan.yaml"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    devices = (*devices, "mode=decoupled")
    shown = plan(MODELS_6B, *devices, "--save", str(saved)).stdout
    chosen, line = read_plan(saved), shown.splitlines()[-1]
    joined = "UCX opens ports that ask for no token" in " ".join(shown.split())
    assert (chosen.network, joined) == (("auto", True) if num_nodes > 1 else (None, False))
    assert line.startswith("RAY_ADDRESS=auto flowtrain train") == (num_nodes > 1)
    if num_nodes > 1:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        *_, line = plan(MODELS_6B, *devices, "--save", str(saved)).stdout.splitlines()
        assert line.startswith("RAY_ADDRESS=10.0.0.1:6379 flowtrain train")
        plan(MODELS_6B, *devices, "pool.network=nixl", "--save", str(saved))
        assert read_plan(saved).network is None, "as configured"
        changes = ["pool.network=none", "training.global_batch_size=64"]
        assert api.resolve(QUICKSTART, changes, plan=chosen).pool.network == "none", "an override wins"


def test_the_address_space_has_room_for_a_node_of_eight_devices_and_all_its_restarts() -> None:
    config = api.resolve(QUICKSTART)
    members = Members(config.pool.max_processes, config.pool.processes_per_node)
    lives = 1 + config.limits.max_encoder_restarts
    for node in range(32):
        for device in range(8):  # a rank, an encoder and a feeder on each
            members.join(f"rank-{node}-{device}", f"node-{node}")
            for _ in range(lives):
                members.join(f"encoder-{node}-{device}", f"node-{node}")
                members.join(f"feeder-{node}-{device}", f"node-{node}")


def test_an_override_of_a_whole_section_does_not_undo_the_plan(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    backbone = api.resolve(QUICKSTART).backbone.model_dump(mode="json") | {"data_parallel_size": 4}
    section = f"backbone={json.dumps(backbone)}"
    *_, line = plan(QUICKSTART, section, "--devices", "4", "--save", str(saved)).stdout.splitlines()
    _, _, _, *overrides = shlex.split(line.split(" --plan ")[0])
    assert overrides[0] == section and overrides[1].startswith("encoders.vision.data_parallel_size=")
    assert fixed_plan(api.resolve(QUICKSTART, overrides, plan=saved)) == read_plan(saved)


def test_a_model_file_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match="vlm_72b.yaml is a model file, which only flowtrain plan takes"):
        flowtrain.train(PAPER[0])
