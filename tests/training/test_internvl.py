"""InternVL on ranks of every axis against HF's class, one sample at a time: losses, every gradient, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain.config.run import RunConfig
from flowtrain.data.images import tiles_of
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleArrays, SampleText, build_batch, pack_texts
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import StepResult, Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from tests.e2e.oracle import backbone_name
from tests.internvl import NORMED_VISION, PROCESSOR, VISION
from tests.training.ranks import CPU, relative_difference, run_ranks
from tests.training.test_parallel import shape

pytestmark = pytest.mark.processes

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"
TOWERS = {"plain": VISION, "normed": NORMED_VISION}
TEXT = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 4224,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
STEPS = (
    (((0,), (1, 2)), ((3,), (4, 5))),
    (((6, 7), (8,)),),
    (((1,), (5,)), ((9,), ())),  # without images, and without samples
)
"""Of two replicas: positions by step, slot and replica. Every fourth sample has no image, from the second on."""


@dataclass(frozen=True)
class Case:
    """How InternVL is trained; trains_tower: in the monolithic mode."""

    mode: str = "decoupled"
    tower: str = "plain"
    trains_tower: bool = False
    place: str = "first"
    sequence_parallel: bool = True

    @property
    def config(self) -> RunConfig:
        encoder = {
            "config": TOWERS[self.tower],
            "feature_layer": -1,
            "image_processor": PROCESSOR,
            "trainable": self.trains_tower,
        }
        return RunConfig.model_validate(
            {
                "name": "internvl",
                "seed": 5,
                "mode": self.mode,
                "model": {"family": "internvl", "tokenizer": str(TOKENIZER)},
                "encoders": {"vision": encoder},
                "backbone": {"config": TEXT, "sequence_parallel": self.sequence_parallel},
                "pipeline": {"encoder_layers": self.place} if self.mode == "monolithic" else {},
                "data": {"sources": [{"path": "unused"}]},
                "training": {
                    "max_steps": 10,
                    "global_batch_size": 8,
                    "optimizer": "sgd",
                    "learning_rate": 1e-2,
                    "lr_schedule": "constant",
                    "weight_decay": 0.0,
                    "max_grad_norm": 0.0,
                },
            }
        )


@dataclass(frozen=True)
class Sample:
    """Token ids with labels, int64 ``[2, T]``, and the tiles of its images, ``[C, H, W]`` each."""

    text: np.ndarray
    tiles: list[np.ndarray]


@dataclass
class Found:
    """What a rank found in each step; weights at the end."""

    results: list[StepResult]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]


def sample_of(family: InternVLFamily, position: int) -> Sample:
    """Images of several aspect ratios between words; the words after them carry loss."""
    rng = np.random.default_rng(position)
    sizes = rng.integers(5, 120, ((2, 0, 1, 1)[position % 4], 2)).tolist()
    tiles, ids = [], rng.integers(300, 4000, 3).tolist()
    for width, height in sizes:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        tiles += tiles_of(family.preprocess("vision", image))
        ids += [family.image_token_id] * family.image_layout("vision", width, height).num_tokens
    words = rng.integers(300, 4000, int(rng.integers(3, 9))).tolist()
    labels = [-100] * len(ids) + words
    return Sample(np.array([ids + words, labels]), tiles)


def batch_of(
    family: InternVLFamily, samples: dict[int, Sample], positions: Sequence[int], with_pixels: bool
) -> PackedBatch:
    options: Any = {
        "image_token_id": family.image_token_id,
        "feature_dim": family.feature_dim("vision"),
        "dtype": torch.float32,
        "loss_normalization": "token",
        "device": CPU,
    }
    chosen = [(position, samples[position]) for position in positions]
    if family.config.mode != "monolithic":
        encoder = family.load_encoder("vision")
        arrays = []
        for position, sample in chosen:
            rows = torch.cat(encoder.encode(sample.tiles)).clone() if sample.tiles else None
            arrays.append(SampleArrays(position, sample.text, rows))
        return build_batch(arrays, **options)
    texts = [SampleText(p, s.text, int((s.text[0] == family.image_token_id).sum())) for p, s in chosen]
    tiles = [torch.from_numpy(tile) for _, sample in chosen for tile in sample.tiles]
    images = ImageBatch(tuple((t.shape[1], t.shape[2]) for t in tiles), tuple(tiles) if with_pixels else ())
    return replace(pack_texts(texts, **options), images=images)


def slots_of(step: Sequence[Sequence[Sequence[int]]], dp: int) -> list[list[Sequence[int]]]:
    """A step's slots for two replicas, or one after another for one."""
    if dp == 2:
        return [list(row) for row in step]
    return [[positions] for row in step for positions in row if positions]


def plan_of(slots: list[list[Sequence[int]]], samples: dict[int, Sample], token: int, number: int) -> StepPlan:
    def planned(position: int) -> PlannedSample:
        text = samples[position].text
        vision, targets = int((text[0] == token).sum()), int((text[1, 1:] != -100).sum())
        return PlannedSample(position, text.shape[1], vision, targets)

    rows = tuple(
        tuple(Microbatch(k, rank, tuple(map(planned, positions)), 1.0) for rank, positions in enumerate(row))
        for k, row in enumerate(slots)
    )
    count = sum(len(positions) for row in slots for positions in row)
    return StepPlan.of_slots(Unit(number, UnitKind.TRAIN, number, 0, count), 4096, rows, ())


def train(rank: int, degrees: Degrees, host: str, port: int, listener: Any, cases: Sequence[Case]) -> list[Found]:
    """Body of one rank's process: the cases in turn."""
    torch.set_num_threads(1)
    group = init_backbone_group(
        rank, degrees, CPU, host=host, port=port, listener=listener, start_timeout_s=300, collective_timeout_s=300
    )
    found = [train_case(group, case) for case in cases]
    group.close()
    return found


def train_case(group: BackboneGroup, case: Case) -> Found:
    family = family_of(case)
    samples = {p: sample_of(family, p) for step in STEPS for row in step for held in row for p in held}
    found = Found([], [], {})

    def full(model: Any, *, gradients: bool) -> dict[str, np.ndarray]:
        values = {}
        for name, parameter in model.named_parameters():
            tensor = parameter.grad if gradients else parameter.detach()
            if tensor is not None and parameter.requires_grad:
                values[model.stored_name(name)] = tensor.full_tensor().numpy().copy()
        return values

    trainer = Trainer(
        family.config,
        family,
        group,
        num_steps=10,
        before_optimizer=lambda model: found.gradients.append(full(model, gradients=True)),
    )
    with_pixels = group.pp_rank == trainer.model.partition.entry_rank
    for number, step in enumerate(STEPS, start=1):
        slots = slots_of(step, group.degrees.dp)
        actions = trainer.begin_unit(plan_of(slots, samples, family.image_token_id, number))
        mine = [row[group.dp_rank] for row in slots]
        batches = [batch_of(family, samples, positions, with_pixels) for positions in mine]
        execute(actions, trainer.stages, batches.__getitem__)
        found.results.append(trainer.finish_unit())
    found.weights = full(trainer.model, gradients=False)
    return found


def family_of(case: Case) -> InternVLFamily:
    family = family_from_config(case.config)
    assert isinstance(family, InternVLFamily)
    return family


@cache
def oracle_of(tower: str, trains_tower: bool) -> tuple[list[float], list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Losses, gradients and weights of HF's class: unpacked, one sample at a time."""
    torch.set_num_threads(1)
    case = Case("monolithic", tower, trains_tower)
    family, losses, gradients = family_of(case), [], []
    model = family.load_joined().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains_tower or "vision_tower" not in name)
    named = {
        backbone_name(name).replace("model.vision_tower.", "encoders.vision.tower."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.endswith("mask_token")
    }
    optimizer = torch.optim.SGD(named.values(), lr=case.config.training.learning_rate)
    for step in STEPS:
        samples = [sample_of(family, p) for row in step for held in row for p in held]
        num_targets = sum(int((sample.text[1, 1:] != -100).sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            ids, labels = (torch.from_numpy(row)[None] for row in sample.text)
            pixels = torch.stack([torch.from_numpy(tile) for tile in sample.tiles]) if sample.tiles else None
            mean = model(input_ids=ids, labels=labels, pixel_values=pixels, use_cache=False).loss
            loss = mean * int((labels[0, 1:] != -100).sum()) / num_targets
            loss.backward()
            total += loss.item()
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        losses.append(total)
        gradients.append({name: parameter.grad.numpy().copy() for name, parameter in named.items()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: parameter.detach().numpy().copy() for name, parameter in named.items()}


def check(outcomes: Sequence[Found], case: Case) -> None:
    """All ranks together have every gradient; what several have is the same everywhere."""
    losses, gradients, weights = oracle_of(case.tower, case.trains_tower)
    for found in outcomes:
        assert [result.loss for result in found.results] == pytest.approx(losses, rel=1e-5)
        assert found.results == outcomes[0].results
    for step, expected in enumerate(gradients):
        merged = {name: value for found in outcomes for name, value in found.gradients[step].items()}
        assert merged.keys() == expected.keys()
        for name, reference in expected.items():
            if not reference.any():
                assert not merged[name].any(), (name, step)
            else:
                assert relative_difference(merged[name], reference) < 1e-5, (name, step)
    merged = {name: value for found in outcomes for name, value in found.weights.items()}
    assert merged.keys() == weights.keys()
    assert all(relative_difference(merged[name], weight) < 1e-5 for name, weight in weights.items())


MODES = [("decoupled", False), ("monolithic", False), ("monolithic", True)]
CASES: dict[Degrees, list[Case]] = {
    Degrees(): [Case(mode, "normed", trained) for mode, trained in MODES],
    Degrees(dp=2): [Case(mode, "plain", trained) for mode, trained in MODES],
    Degrees(pp=2): [
        Case("decoupled"),
        *(Case("monolithic", "plain", trained, place) for trained in (False, True) for place in ("mixed", "own")),
    ],
    Degrees(tp=2): [
        Case(mode, tower, trained, sequence_parallel=split)
        for (mode, trained), tower, split in product(MODES, TOWERS, (True, False))
        if tower == "plain" or mode == "monolithic"
    ],
}


@pytest.mark.parametrize("degrees", CASES, ids=shape)
def test_training_equals_a_plain_loop(degrees: Degrees) -> None:
    of_ranks = run_ranks(degrees, CASES[degrees], train)
    for case, outcomes in zip(CASES[degrees], zip(*of_ranks, strict=True), strict=True):
        try:
            check(outcomes, case)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error
