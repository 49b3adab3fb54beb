"""Losses of held-out sets, and the files of what the model answered."""

from __future__ import annotations

import json
import logging
import math
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowtrain.controller import held_out
from flowtrain.controller.evaluations import Evaluations, StepLosses
from flowtrain.controller.held_out import MAX_SIDE, HeldOutSamples, shown_sample
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.data.sources.base import BadSample, RawImage, RawSample, Turn
from flowtrain.flow.units import unit_sequence
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.evaluation import GeneratedAnswer
from flowtrain.types.events import UnitDone
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.run_events import EvaluationFinished, GeneratedSample
from flowtrain.types.samples import RejectReason
from tests.controller.test_recorder import done
from tests.disk import full_from
from tests.e2e.worlds import World, tiny_config

EVERY = 2


@pytest.fixture
def run_spec(tmp_path: Path) -> RunSpec:
    """Two held-out sets after every second step: ``many`` has pictures, ``few`` no picture; 2 and 1 are answered."""
    training, many, few = World(seed=1), World(seed=2), World(seed=3)
    training.add_mixed(8)
    many.add(2, answer="a cat")
    many.add(1, answer="two boats")
    many.add(1, answer="never shown")
    few.add(0, answer="<b>bold</b>\n")
    paths = {name: str(world.write(tmp_path / f"{name}.parquet")) for name, world in (("many", many), ("few", few))}
    held_out = {
        "many": {"path": paths["many"], "every_steps": EVERY, "num_generated": 2},
        "few": {"path": paths["few"], "every_steps": EVERY, "num_generated": 5},
    }
    return prepare(tiny_config(tmp_path, training.write(tmp_path / "train.parquet"), data={"eval": held_out}))


@pytest.fixture
def files(tmp_path: Path) -> RunDir:
    root = tmp_path / "run"
    root.mkdir()
    return RunDir(root)


def rounds(run_spec: RunSpec, step: int) -> list[Unit]:
    units = unit_sequence(step, 8, None, run_spec.evaluations, step - 1)
    return [unit for unit in units if unit.kind is UnitKind.EVAL]


def answered(unit: Unit, texts: Sequence[str], loss: float = 1.0) -> UnitDone:
    """Every other answer is of the second replica."""
    event = done(unit, loss=loss)
    answers = [GeneratedAnswer(unit.first_position + row, text, 3) for row, text in enumerate(texts)]
    reports = [replace(report, generated=tuple(answers[rank::2])) for rank, report in enumerate(event.reports)]
    return replace(event, reports=tuple(reports))


def take_all(evaluations: Evaluations, run_spec: RunSpec, step: int) -> Iterator[EvaluationFinished]:
    many, few = rounds(run_spec, step)
    yield evaluations.take(answered(many, [f"answer {step}", "another"]), 0.5)
    yield evaluations.take(answered(few, ["plain"]), 0.25)


def records(files: RunDir, step: int, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files.generated / str(step) / f"{name}.jsonl").read_text().splitlines()]


def test_answers_are_told_and_written_with_texts_and_pictures(run_spec: RunSpec, files: RunDir) -> None:
    evaluations = Evaluations(run_spec, files, 0)
    many, few = take_all(evaluations, run_spec, 2)
    assert (many.step, many.name, many.duration_s, many.num_samples) == (2, "many", 0.5, 4)
    first, second = many.generated
    assert (first.source, first.row, first.reference, first.text) == ("many", 0, "a cat", "answer 2")
    assert first.prompt.count("<image>") == 2 and second.prompt.count("<image>") == 1
    assert first.images == ("generated/2/many-0-0.png", "generated/2/many-0-1.png")
    assert second.images == ("generated/2/many-1-0.png",)
    assert few.generated == (GeneratedSample("few", 0, few.generated[0].prompt, "<b>bold</b>\n", "plain", ()),)
    for name in (*first.images, *second.images):
        with Image.open(files.root / name) as image:
            assert image.format == "PNG" and max(image.size) <= MAX_SIDE
        assert stat.S_IMODE((files.root / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((files.generated / "2").stat().st_mode) == 0o700
    (line, _) = records(files, 2, "many")
    assert line == {
        **{"schema": 1, "step": 2, "source": "many", "row": 0, "prompt": first.prompt},
        **{"reference": "a cat", "text": "answer 2", "images": list(first.images)},
    }


def test_pictures_are_written_once_and_what_a_resume_repeats_is_removed(run_spec: RunSpec, files: RunDir) -> None:
    evaluations = Evaluations(run_spec, files, 0)
    for step in (2, 4, 6):
        (many, _) = take_all(evaluations, run_spec, step)
    assert many.generated[0].images[0] == "generated/2/many-0-0.png", "later steps name the same file"
    assert sorted(path.name for path in (files.generated / "4").iterdir()) == ["few.jsonl", "many.jsonl"]
    (files.generated / "notes").mkdir()
    resumed = Evaluations(run_spec, files, 4)
    assert sorted(path.name for path in files.generated.iterdir()) == ["2", "4", "notes"]
    (again, _) = take_all(resumed, run_spec, 6)
    assert again == replace(many, timestamp=again.timestamp) and (files.root / again.generated[0].images[0]).is_file()


def test_without_answers_nothing_is_read_or_written(
    run_spec: RunSpec, files: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a thread is started")

    monkeypatch.setattr(held_out.threading, "Thread", no_thread)
    sets = {name: each.model_copy(update={"num_generated": 0}) for name, each in run_spec.config.data.eval_sets.items()}
    data = run_spec.config.data.model_copy(update={"eval": sets})
    spec = replace(run_spec, config=run_spec.config.model_copy(update={"data": data}))
    event = Evaluations(spec, files, 0).take(answered(rounds(spec, 2)[0], []), 0.5)
    assert event.generated == () and not files.generated.exists()


def test_a_full_disk_costs_the_files_alone(run_spec: RunSpec, files: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    evaluations = Evaluations(run_spec, files, 0)
    with full_from(0):
        (many, _) = take_all(evaluations, run_spec, 2)
    assert [each.text for each in many.generated] == ["answer 2", "another"]
    assert many.generated[0].images == ()
    assert caplog.text.count("generated/ could not be written") == 1
    (many, _) = take_all(evaluations, run_spec, 4)
    assert many.generated[0].images[0] == "generated/2/many-0-0.png", "it is tried again"


def test_rows_that_cannot_be_read_are_shown_without_texts_and_pictures(
    run_spec: RunSpec, files: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(raw: RawSample, config: Any) -> Any:
        if len(raw.images) == 2:
            raise BadSample(RejectReason.CORRUPT_IMAGE, "broken")
        return shown_sample(raw, config)

    monkeypatch.setattr(held_out, "shown_sample", broken)
    evaluations = Evaluations(run_spec, files, 0)
    with caplog.at_level(logging.WARNING):
        assert evaluations._samples.get(0, 1) is not None
        assert not caplog.text, "the model may not answer a bad row either"
        (many, _) = take_all(evaluations, run_spec, 2)
        list(take_all(evaluations, run_spec, 4))
    assert many.generated[0] == GeneratedSample("many", 0, "", "", "answer 2", ())
    assert many.generated[1].reference == "two boats"
    assert caplog.text.count("row 0 of eval/many is shown without its texts and pictures") == 1


def test_storage_that_does_not_answer_holds_up_only_the_first_evaluation(
    run_spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    samples = HeldOutSamples(run_spec.config.data, run_spec.indexes, (0, 0))
    monkeypatch.setattr(samples._is_read, "wait", lambda limit: waited.append(limit))
    assert [samples.get(0, 0), samples.get(0, 1)] == [None, None]
    assert waited == [held_out.READ_LIMIT_S, 0.0]


# --- samples as people see them --------------------------------------------------------------------------------------


def test_a_prompt_is_what_comes_before_the_first_answer(run_spec: RunSpec) -> None:
    world = World(seed=5)
    pictures = tuple(RawImage(world.image()) for _ in range(3))
    turns = [("system", "be brief"), ("user", "<image>what?<image>"), ("assistant", "one"), ("user", "<image>and?")]
    raw = RawSample(pictures, tuple(Turn(role, text) for role, text in [*turns, ("assistant", "two")]))  # type: ignore[arg-type]
    sample = shown_sample(raw, run_spec.config.data)
    assert (sample.prompt, sample.reference) == ("be brief\n<image>what?<image>", "one")
    assert len(sample.pictures) == 2, "the third is of the second question"


def test_a_large_picture_is_made_smaller_and_one_beyond_the_limits_is_refused(
    run_spec: RunSpec, tmp_path: Path
) -> None:
    Image.new("RGB", (2000, 1000)).save(tmp_path / "large.png")
    raw = RawSample((RawImage((tmp_path / "large.png").read_bytes()),), (Turn("user", "<image>"),))
    (picture,) = shown_sample(raw, run_spec.config.data).pictures
    (tmp_path / "small.png").write_bytes(picture)
    assert Image.open(tmp_path / "small.png").size == (512, 256)
    strict = run_spec.config.data.model_copy(update={"max_image_pixels": 1000})
    with pytest.raises(BadSample):
        shown_sample(raw, strict)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_of_one_set_is_kept_to_the_bit_and_of_several_is_weighted() -> None:
    one, several, empty = StepLosses(), StepLosses(), StepLosses()
    one.add("eval", 0.1 + 0.2, 7)
    assert one.mean == 0.1 + 0.2 and one.as_metrics() == {"eval_loss": 0.1 + 0.2, "eval_loss/eval": 0.1 + 0.2}
    for name, loss, weight in (("a", 1.0, 3), ("b", 3.0, 1), ("all rejected", 0.0, 0)):
        several.add(name, loss, weight)
    assert several.mean == 1.5
    assert empty.mean is None and empty.as_metrics() == {}
    several.add("diverged", math.nan, 4)
    assert set(several.as_metrics()) == {"eval_loss/a", "eval_loss/b", "eval_loss/all rejected"}


@pytest.mark.parametrize(("normalization", "mean"), [("token", 2.0), ("sample", 1.5)])
def test_sets_weigh_by_what_their_losses_are_means_over(
    run_spec: RunSpec, files: RunDir, normalization: str, mean: float
) -> None:
    training = run_spec.config.training.model_copy(update={"loss_normalization": normalization})
    spec = replace(run_spec, config=run_spec.config.model_copy(update={"training": training}))
    evaluations = Evaluations(spec, files, 0)
    for unit, loss, num_samples, num_targets in zip(rounds(spec, 2), (1.0, 3.0), (3, 1), (10, 10), strict=True):
        event = done(unit, loss=loss)
        reports = [replace(r, num_samples=num_samples, num_target_tokens=num_targets) for r in event.reports]
        evaluations.take(replace(event, reports=tuple(reports)), 0.0)
    assert evaluations.of_step(2).mean == mean
