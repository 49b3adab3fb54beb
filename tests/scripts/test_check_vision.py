"""What the check of a model's sight computes: pairs, its verdict, and a loss on the tokens that training labels."""

from __future__ import annotations

import json
from pathlib import Path

import caption
import check_vision
import pytest
import torch
from check_vision import Verdict, check, verdict_of
from exported import ExportedModel, Sample, samples
from PIL import Image
from shared.random_tower import RANDOM_TOWER_OVERRIDES

from flowtrain.config.load import load_config
from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sources.base import Turn
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = ROOT / "assets" / "shapes" / "eval.parquet"
TINY = (
    *RANDOM_TOWER_OVERRIDES,
    "encoders.vision.config.hidden_size=32",
    "encoders.vision.config.num_hidden_layers=1",
    "backbone.config.hidden_size=32",
    "backbone.config.num_hidden_layers=1",
)


def sample(number: int) -> Sample:
    return Sample(Image.new("RGB", (number + 1, 1)), f"question {number}", f"answer {number}")


class Scripted(ExportedModel):
    """Loses 1 with an answer's own picture, else 3, and one sample's pictures do not matter to it."""

    def __init__(self, blind_to: int | None = None) -> None:
        self.asked: list[tuple[int, str]] = []
        self.blind_to = blind_to

    def answer_loss(self, image: Image.Image, question: str, answer: str) -> float:
        self.asked.append((image.width - 1, answer))
        is_own = answer == f"answer {image.width - 1}" or answer == f"answer {self.blind_to}"
        return 1.0 if is_own else 3.0


def test_every_answer_meets_its_own_picture_and_another_one() -> None:
    model = Scripted()
    verdict = check(model, [sample(number) for number in range(5)])
    own, other = model.asked[:5], model.asked[5:]
    assert own == [(number, f"answer {number}") for number in range(5)]
    assert [answer for _, answer in other] == [answer for _, answer in own]
    assert all(f"answer {picture}" != answer for picture, answer in other)
    assert sorted(picture for picture, _ in other) == list(range(5)), "every picture is another's once"
    assert verdict == Verdict(5, 1.0, 3.0, 2.0, 0.0) and verdict.sees


def test_the_standard_error_is_that_of_the_mean_difference() -> None:
    verdict = check(Scripted(blind_to=2), [sample(number) for number in range(4)])
    assert verdict.difference == pytest.approx(1.5) and verdict.standard_error == pytest.approx(0.5)
    assert not verdict.sees, "three standard errors are not more than three"
    assert not verdict_of([1.0, 1.0], [1.04, 1.04]).sees, "less than the margin"
    assert verdict_of([1.0, 1.0], [1.06, 1.06]).sees
    assert not verdict_of([1.0, 2.0, 1.0], [1.0, 2.0, 1.0]).sees
    with pytest.raises(ValueError, match="1 held-out samples have one picture; at least 2 are needed"):
        verdict_of([1.0], [2.0])


@pytest.fixture(scope="module")
def family() -> Family:
    return family_from_config(load_config(ROOT / "configs" / "quickstart.yaml", TINY))


@pytest.fixture(scope="module")
def exported(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    family.export(family.load_backbone().state_dict(), run / "export")
    return run


def test_the_loss_is_over_the_tokens_that_training_labels(family: Family, exported: Path) -> None:
    model = ExportedModel(exported / "export")
    for each in list(samples(HELD_OUT))[:8]:
        inputs, labels = model.labelled(each.image, each.question, each.answer)
        turns = (Turn("user", f"<image>\n{each.question}"), Turn("assistant", each.answer))
        trained = ConversationEncoder(family.tokenizer).encode(turns)
        assert labels[labels != -100].tolist() == trained.labels[trained.labels != -100].tolist()
        # Training has one image token where the processor has one for each patch, and a line's end after the answer.
        ids = [id for id in inputs["input_ids"][0].tolist() if id != family.image_token_id]
        assert ids == [id for id in trained.ids.tolist() if id != family.image_token_id][: len(ids)]
    logits = model.model(**inputs).logits[0, :-1].log_softmax(-1)
    targets = labels[0, 1:]
    by_hand = -logits[torch.arange(len(targets)), targets.clamp(min=0)][targets != -100].mean()
    assert model.answer_loss(each.image, each.question, each.answer) == pytest.approx(by_hand.item(), rel=1e-5)


def test_a_blind_model_fails_the_check(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_vision.py", str(exported), "--count", "8"])
    with pytest.raises(SystemExit, match="the pictures do not matter"):
        check_vision.main()
    assert "held-out loss of 8 answers" in capsys.readouterr().out


def test_captions_are_shown_beside_what_is_to_be_seen(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"step": step, "loss": 8.0 / step, "eval_loss": 2.0 if step == 3 else None} for step in (1, 2, 3, 4)]
    (exported / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["caption.py", str(exported), "--data", str(HELD_OUT), "--count", "2"])
    caption.main()
    shown = capsys.readouterr().out
    assert all(each.question in shown and each.answer in shown for each in list(samples(HELD_OUT))[:2])
    assert "loss 4.167 -> 4.167 (1.00x) in 4 steps" in shown and "held-out loss 2.000 -> 2.000" in shown
    assert "metrics.jsonl" in shown and "trace.json" not in shown


def test_held_out_samples_have_one_picture() -> None:
    found = list(samples(ROOT / "assets" / "openclipart" / "eval.parquet"))
    assert len(found) == 44 and all(each.answer for each in found)
