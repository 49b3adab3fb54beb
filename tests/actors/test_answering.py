"""A rank's part in answering held-out samples, against Hugging Face's ``generate`` of the whole model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain.actors.answering import Answering, answering_of
from flowtrain.actors.reading import Fetched
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data.images import tiles_of
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.models.families.base import Family
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.batch import SampleArrays, build_batch
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, SampleRef
from tests import internvl, qwen3_vl
from tests.e2e.worlds import World, tiny_config
from tests.internvl import stock_pixels
from tests.qwen3_vl import stock_inputs

NUM_ROWS, NUM_ANSWERED, MAX_NEW_TOKENS = 5, 4, 8
FIRST = EVAL_POSITION_BASE + 40


@dataclass
class Rank:
    """A single rank with its model, and the held-out samples as it reads them."""

    config: RunConfig
    family: Family
    trainer: Trainer
    sized: list[SizedResult]
    images: list[list[Image.Image]]
    features: list[torch.Tensor | None]

    def answering(self, **changes: Any) -> Answering:
        found = answering_of(override_config(self.config, [f"{k}={v}" for k, v in changes.items()]), *self.others)
        assert found is not None
        return found

    @property
    def others(self) -> tuple[Family, Trainer, bool]:
        return self.family, self.trainer, True

    def fetched(self, slot: int, rows: list[int]) -> Fetched:
        samples = [SampleArrays(FIRST + row, self.sized[row].text, self.features[row]) for row in rows]
        batch = build_batch(
            samples,
            image_token_id=self.family.image_token_id,
            feature_dim=self.family.pooled_dim("vision"),
            dtype=torch.float32,
            loss_normalization="token",
            device=torch.device("cpu"),
        )
        return Fetched(slot, batch, 0.0)

    def plan(self, *slots: list[int]) -> StepPlan:
        microbatches = [
            (Microbatch(slot, 0, tuple(PlannedSample(FIRST + row, 9, 0, 3) for row in rows), 1.0),)
            for slot, rows in enumerate(slots)
        ]
        return StepPlan.of_slots(Unit(3, UnitKind.EVAL, 2, FIRST, NUM_ROWS), 128, microbatches, ())

    def expected(self, row: int, max_new_tokens: int) -> str:
        """What Hugging Face's class says."""
        ids, labels = (torch.from_numpy(each.astype(np.int64)) for each in self.sized[row].text[:2])
        prompt = ids[: int((labels != -100).nonzero()[0])][None]
        inputs, family = dict[str, torch.Tensor](), self.family
        if isinstance(family, Qwen3VLFamily):
            inputs = stock_inputs(self.images[row], prompt, family.image_token_id)
        elif self.images[row] and isinstance(family, InternVLFamily):
            inputs = {"pixel_values": stock_pixels(family, self.images[row])}
        elif self.images[row]:
            processed = family.image_processor(self.images[row], return_tensors="pt")  # type: ignore[attr-defined]
            inputs = {"pixel_values": processed["pixel_values"]}
        model, end = self.family.load_joined().eval(), self.family.tokenizer.eos_token_id
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        with torch.no_grad():
            output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **inputs, **settings)
        return str(self.family.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def overrides_of(family: str) -> list[str]:
    """Tiny models of a family."""
    given = [f"model.family={family}"]
    if family == "qwen3_vl":
        text, processor = {**qwen3_vl.TEXT, "vocab_size": 4224}, qwen3_vl.PROCESSOR
        given += [f"backbone.config={json.dumps(text)}", f"encoders.vision.config={json.dumps(qwen3_vl.VISION)}"]
        given += [f"encoders.vision.image_processor={json.dumps(processor)}", "encoders.vision.max_batch_patches=200"]
    elif family == "internvl":
        given += [f"encoders.vision.config={json.dumps(internvl.VISION)}"]
        given += [f"encoders.vision.image_processor={json.dumps(internvl.PROCESSOR)}"]
        given += ["encoders.vision.feature_layer=-1", "backbone.config.vocab_size=4224"]
    return given


@pytest.fixture(scope="module", params=["llava", "qwen3_vl", "internvl"])
def rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    directory = tmp_path_factory.mktemp("answering")
    world = World(seed=6)
    for count in (1, 0, 2, 1, 1):
        world.add(count)
    path = str(world.write(directory / "rows.parquet"))
    config = tiny_config(
        directory,
        Path(path),
        data={
            "eval": {"path": path, "num_generated": NUM_ANSWERED, "max_new_tokens": MAX_NEW_TOKENS},
            "max_seq_len": 256,
        },
        scheduler={"microbatch_tokens": 256},
    )
    config = override_config(config, overrides_of(request.param))
    family = family_from_config(config)
    sources, sizer = SourceSet.from_config(config.data), Sizer(family, family.tokenizer, config.data)
    encoder = family.load_encoder("vision")
    sized, images, features = [], list[list[Image.Image]](), list[torch.Tensor | None]()
    for row in range(NUM_ROWS):
        ref = SampleRef(FIRST + row, 1, row, 0)
        raw = sources.read(ref)
        loaded: Any = sizer.load(ref, raw)
        result = sizer.size(ref, loaded.measured)
        assert isinstance(result, SizedResult)
        sized.append(result)
        images.append([Image.open(io.BytesIO(image.read())).convert("RGB") for image in raw.images])
        rows = encoder.encode([tile for image in images[-1] for tile in tiles_of(family.preprocess("vision", image))])
        features.append(torch.cat(rows).clone() if rows else None)
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield Rank(config, family, Trainer(config, family, group, num_steps=4), sized, images, features)
    group.close()


def test_the_first_samples_are_answered_as_hugging_face_answers_them(rank: Rank) -> None:
    answering, plan = rank.answering(), rank.plan([3, 0], [4], [2, 1])
    for slot, rows in enumerate(([3, 0], [4], [2, 1])):
        answering.keep(plan, rank.fetched(slot, rows))
    found = answering.answers(plan)
    assert [answer.position for answer in found] == [FIRST + row for row in range(NUM_ANSWERED)]
    assert [answer.text for answer in found] == [rank.expected(row, MAX_NEW_TOKENS) for row in range(NUM_ANSWERED)]
    assert all(0 < answer.num_tokens <= MAX_NEW_TOKENS for answer in found)
    for slot, rows in enumerate(([3, 0], [4], [2, 1])):
        answering.keep(plan, rank.fetched(slot, rows))
    assert answering.answers(plan) == found, "nothing is left of the round before"


def test_a_sample_that_was_found_bad_is_not_answered(rank: Rank) -> None:
    answering, plan = rank.answering(), rank.plan([0, 1], [2])
    answering.keep(plan, rank.fetched(0, [1]))
    assert [answer.position for answer in answering.answers(plan)] == [FIRST + 1]
    assert [answer.position for answer in answering.answers(plan)] == []


def test_a_round_without_a_sample_to_answer_runs_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.trainer, "next_tokens", None)
    answering, plan = rank.answering(), rank.plan([4])
    answering.keep(plan, rank.fetched(0, [4]))
    assert answering.answers(plan) == ()


def test_answers_end_at_the_longest_sequence_and_at_the_end_of_a_turn(rank: Rank) -> None:
    prompt = int((rank.sized[0].text[1] != -100).nonzero()[0][0])
    plan = rank.plan([0])
    short = rank.answering(**{"data.max_seq_len": prompt + 2})
    short.keep(plan, rank.fetched(0, [0]))
    (answer,) = short.answers(plan)
    assert answer.num_tokens == 2 and answer.text == rank.expected(0, 2)
    answering = rank.answering()
    answering.keep(plan, rank.fetched(0, [0]))
    (kept,) = answering._prompts.values()
    assert answering._stops(kept) == {rank.family.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    answering._special.add(kept.reference[0])
    cut = type(kept)(kept.position, kept.batch, kept.reference[:1])
    assert answering._stops(cut) > {kept.reference[0]}, "whatever special token ends the answer in the data"


def test_only_the_leader_reports_and_without_answers_there_is_no_part(rank: Rank) -> None:
    family, trainer, _ = rank.others
    member = answering_of(rank.config, family, trainer, is_leader=False)
    assert member is not None
    plan = rank.plan([0])
    member.keep(plan, rank.fetched(0, [0]))
    assert member.answers(plan) == ()
    without = override_config(rank.config, ["data.eval.num_generated=0"])
    assert answering_of(without, family, trainer, is_leader=True) is None
