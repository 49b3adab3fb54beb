"""Answers of the ranks at all sorts of parallel sizes, against Hugging Face's ``generate`` of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowtrain.config.run import RunConfig
from flowtrain.models.stage import shallow_copy
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import PackedBatch, weightless
from flowtrain.training.generation import Prompt, answers_to, prompt_of
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, UnitKind
from tests.training.ranks import (
    CPU,
    IMAGE_TOKEN,
    Slots,
    TinyFamily,
    make_batch,
    make_config,
    make_plan,
    make_sample,
    run_ranks,
)
from tests.training.test_monolithic import config_of as monolithic
from tests.training.test_parallel import FAMILY, INTERLEAVED, at_night, shape
from tests.training.towers import FEATURE_DIM, make_images, make_tower, plain_features

FAMILY = replace(FAMILY, tied=False)
LIMIT, STOPS = 6, (3, 29)
"""The most tokens of an answer but for one prompt, and the tokens that end one."""


def is_plain(position: int) -> bool:
    """Whether no image stands in what is to be answered, as in data."""
    ids, labels = make_sample(position).text
    return not (labels[ids == IMAGE_TOKEN] != -100).any()


POSITIONS = [position for position in range(60) if is_plain(position)][:9]
SHORT = POSITIONS[1]
"""Its answer has two tokens at most."""
CONFIG = make_config(training={"learning_rate": 1e-3})


def slots_for(dp_size: int) -> Slots:
    """Microbatches of two samples or one, dealt to the replicas in turn."""
    held = [tuple(POSITIONS[0:2]), tuple(POSITIONS[2:3]), tuple(POSITIONS[3:5]), tuple(POSITIONS[5:7])]
    held += [tuple(POSITIONS[7:9])] + [()] * (-5 % dp_size)
    return tuple(tuple(held[k : k + dp_size]) for k in range(0, len(held), dp_size))


def limit_of(position: int) -> int:
    return 2 if position == SHORT else LIMIT


@dataclass(frozen=True)
class Questions:
    """An evaluation after which the samples at ``wanted`` are answered, between two training steps."""

    config: RunConfig
    family: TinyFamily
    wanted: tuple[int, ...]
    answers: bool = True


@dataclass(frozen=True)
class Answered:
    answers: dict[int, list[int]]
    references: dict[int, tuple[int, ...]]
    losses: list[float]
    weights: dict[str, np.ndarray]
    is_random_state_kept: bool


def run_questions(rank: int, degrees: Degrees, host: str, port: int, listener: Any, asked: Questions) -> Answered:
    """Body of one rank's process."""
    group = init_backbone_group(rank, degrees, CPU, host=host, port=port, listener=listener, start_timeout_s=300)
    trainer = Trainer(asked.config, asked.family, group, num_steps=10)
    slots, prompts, losses = slots_for(degrees.dp), list[Prompt](), list[float]()
    shape_of = trainer.model.encoder
    with_pixels = group.pp_rank == trainer.model.partition.entry_rank

    def run(kind: UnitKind, step: int) -> None:
        plan = make_plan(slots, step, kind)
        held = [slot[group.dp_rank] for slot in slots]

        def keep(batch: PackedBatch) -> None:
            if kind is UnitKind.EVAL:
                for index in (index for index, each in enumerate(batch.positions) if each in asked.wanted):
                    rows_of = shape_of.shape.num_rows if shape_of is not None else None
                    prompts.append(prompt_of(batch, index, IMAGE_TOKEN, rows_of))

        actions = trainer.begin_unit(plan)
        make = lambda number: make_batch(held[number], asked.config, with_pixels=with_pixels)  # noqa: E731
        execute(actions, trainer.stages, make, keep)
        losses.append(trainer.finish_unit().loss)

    run(UnitKind.TRAIN, 1)
    run(UnitKind.EVAL, 1)
    counts = [sum(p in asked.wanted for slot in slots for p in slot[rank]) for rank in range(degrees.dp)]
    before, answers = torch.random.get_rng_state(), list[list[int]]()
    if asked.answers:
        idle = weightless(FEATURE_DIM, torch.float32, CPU)
        limits = [limit_of(prompt.position) for prompt in prompts]
        answers = answers_to(prompts, max(counts), limits, [STOPS] * len(prompts), idle, trainer)
    is_kept = torch.equal(before, torch.random.get_rng_state())
    run(UnitKind.TRAIN, 2)
    weights = {
        trainer.model.stored_name(name): parameter.detach().full_tensor().numpy().copy()
        for name, parameter in trainer.model.named_parameters()
        if not name.startswith("encoders.")
    }
    group.close()
    found = {prompt.position: answer for prompt, answer in zip(prompts, answers, strict=asked.answers)}
    return Answered(found, {each.position: each.reference for each in prompts}, losses, weights, is_kept)


@cache
def expected(mode: str) -> dict[int, list[int]]:
    """What Hugging Face's class generates with the weights after one training step, one sample at a time."""
    config, family = monolithic(FAMILY) if mode == "monolithic" else CONFIG, FAMILY
    (trained,) = run_ranks(1, Questions(config, family, (), answers=False), run_after_one_step)
    backbone = family.load_backbone().eval()
    backbone.load_state_dict({name: torch.from_numpy(value) for name, value in trained.items()}, strict=False)
    own = shallow_copy(backbone.language_model)
    model = AutoModelForCausalLM.from_config(own.config, attn_implementation="sdpa").eval()
    model.load_state_dict(own.state_dict())
    answers = {}
    for position in POSITIONS:
        sample = make_sample(position)
        ids, labels = (torch.from_numpy(row.astype(np.int64)) for row in sample.text)
        stop = int((labels[1:] != -100).nonzero()[0]) + 1
        embedded, features = model.get_input_embeddings()(ids[:stop]), sample.features
        if features is not None:
            if config.mode == "monolithic":
                images = make_images(position, len(features))
                features = torch.cat([plain_features(make_tower(family.tower), image) for image in images])
            places = (ids[:stop] == IMAGE_TOKEN).nonzero().flatten()
            embedded = embedded.index_copy(0, places, backbone.connector(features[: len(places)]))
        with torch.no_grad():
            tokens = model.generate(
                inputs_embeds=embedded[None],
                attention_mask=torch.ones(1, stop, dtype=torch.int64),
                max_new_tokens=limit_of(position),
                do_sample=False,
                eos_token_id=list(STOPS),
                pad_token_id=0,
            )
        answers[position] = tokens[0].tolist()
    return answers


def run_after_one_step(
    rank: int, degrees: Degrees, host: str, port: int, listener: Any, asked: Questions
) -> dict[str, np.ndarray]:
    """Body of one rank's process: the weights after one step."""
    group = init_backbone_group(rank, degrees, CPU)
    trainer = Trainer(asked.config, asked.family, group, num_steps=10)
    batches = [make_batch(slot[0], asked.config) for slot in slots_for(1)]
    execute(trainer.begin_unit(make_plan(slots_for(1), 1)), trainer.stages, lambda number: batches[number])
    trainer.finish_unit()
    weights = {
        trainer.model.stored_name(name): parameter.detach().full_tensor().numpy().copy()
        for name, parameter in trainer.model.named_parameters()
        if not name.startswith("encoders.")
    }
    group.close()
    return weights


def check(outcomes: Sequence[Answered], config: RunConfig, wanted: Sequence[int]) -> None:
    """Every prompt was answered once, by all ranks of its replica alike, as Hugging Face answers it."""
    answers = expected(config.mode)
    found: dict[int, list[int]] = {}
    for outcome in outcomes:
        for position, tokens in outcome.answers.items():
            assert found.setdefault(position, tokens) == tokens, "all ranks of a replica have the same"
        assert outcome.is_random_state_kept
    assert found == {position: answers[position] for position in wanted}


@pytest.mark.processes
def test_the_answers_compared_here_differ_and_some_end_early() -> None:
    answers = expected(CONFIG.mode)
    ends = {position: tokens[-1] in STOPS for position, tokens in answers.items()}
    assert len({tuple(tokens) for tokens in answers.values()}) >= 6
    assert any(len(answers[p]) < limit_of(p) for p in POSITIONS if ends[p]) and not all(ends.values())
    assert len(answers[SHORT]) == 2


@pytest.mark.processes
@pytest.mark.parametrize(
    "degrees",
    [Degrees(), Degrees(dp=2), Degrees(pp=2), at_night(tp=2), at_night(dp=2, tp=2), Degrees(pp=2, tp=2)],
    ids=shape,
)
def test_answers_are_those_of_hugging_face_and_training_goes_on_as_without(degrees: Degrees) -> None:
    wanted = tuple(POSITIONS[:6])
    outcomes = run_ranks(degrees, Questions(CONFIG, FAMILY, wanted), run_questions)
    check(outcomes, CONFIG, wanted)
    without = run_ranks(degrees, Questions(CONFIG, FAMILY, wanted, answers=False), run_questions)
    for outcome, plain in zip(outcomes, without, strict=True):
        assert outcome.losses == plain.losses
        assert all(np.array_equal(weight, plain.weights[name]) for name, weight in outcome.weights.items())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("degrees", "backbone"),
    [
        (Degrees(dp=2, pp=2), {"sharding": "gradients"}),
        (Degrees(tp=2), {"sequence_parallel": False}),
    ],
    ids=shape,
)
def test_other_settings_change_no_answer(degrees: Degrees, backbone: dict[str, Any]) -> None:
    config = CONFIG.model_copy(update={"backbone": CONFIG.backbone.model_copy(update=backbone)})
    wanted = tuple(POSITIONS[2:])
    check(run_ranks(degrees, Questions(config, FAMILY, wanted), run_questions), config, wanted)


@pytest.mark.processes
def test_an_interleaved_pipeline_answers_alike() -> None:
    config = CONFIG.model_copy(update={"pipeline": CONFIG.pipeline.model_copy(update=INTERLEAVED)})
    check(run_ranks(Degrees(pp=2), Questions(config, FAMILY, tuple(POSITIONS)), run_questions), config, POSITIONS)


@pytest.mark.processes
@pytest.mark.parametrize("place", ["first", "mixed", "own"])
@pytest.mark.parametrize("degrees", [Degrees(), Degrees(dp=2, pp=2)], ids=shape)
def test_with_the_encoder_in_the_pipeline(degrees: Degrees, place: str) -> None:
    config = monolithic(FAMILY, encoder_layers=place)
    wanted = tuple(POSITIONS[1:6])
    check(run_ranks(degrees, Questions(config, FAMILY, wanted), run_questions), config, wanted)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_ends_before_the_first_answer() -> None:
    batch = make_batch(POSITIONS[:4], CONFIG)
    for index, position in enumerate(POSITIONS[:4]):
        prompt, sample = prompt_of(batch, index, IMAGE_TOKEN), make_sample(position)
        ids, labels = sample.text
        first = int(np.flatnonzero(labels != -100)[0])
        assert prompt.position == position and prompt.num_tokens == first
        assert prompt.batch.input_ids.tolist() == ids[:first].tolist()
        assert list(prompt.reference) == labels[first:].tolist()
        features = sample.features if sample.features is not None else torch.zeros(0, FEATURE_DIM)
        assert torch.equal(prompt.batch.features, features)
        assert (prompt.batch.input_ids[prompt.batch.feature_index] == IMAGE_TOKEN).all()


def test_an_answer_counts_on_after_the_prompt_on_all_axes() -> None:
    batch = make_batch(POSITIONS[:2], CONFIG)
    prompt = prompt_of(batch, 1, IMAGE_TOKEN)
    length = prompt.num_tokens
    asked = prompt.asking([7, 8])
    assert asked.input_ids.tolist() == [*prompt.batch.input_ids.tolist(), 7, 8]
    assert asked.position_ids.tolist() == list(range(length + 2))
    assert asked.cu_seqlens.tolist() == [0, length + 2] and asked.next_index is not None
    assert asked.next_index.tolist() == [length + 1] and asked.sequence_lengths == (length + 2,)
    axes = torch.stack([torch.arange(length), torch.arange(length) + 3, torch.arange(length)])
    three = replace(prompt, batch=replace(prompt.batch, position_ids=axes)).asking([7, 8])
    assert three.position_ids[:, length:].tolist() == [[length + 3, length + 4]] * 3, "after the furthest of them"


def test_of_a_microbatch_with_images_a_prompt_has_its_own() -> None:
    config = monolithic(FAMILY)
    batch = make_batch(POSITIONS[:5], config)
    rows_of = lambda size: (size[0] // 2) * (size[1] // 2)  # noqa: E731
    for index, position in enumerate(POSITIONS[:5]):
        features = make_sample(position).features
        images = [] if features is None else make_images(position, len(features))
        found = prompt_of(batch, index, IMAGE_TOKEN, rows_of).batch.images
        assert found is not None and found.sizes == tuple(tuple(image.shape[1:]) for image in images)
        assert all(torch.equal(one, other) for one, other in zip(found.pixels, images, strict=True))
