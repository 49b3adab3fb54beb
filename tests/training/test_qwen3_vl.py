"""Qwen3-VL on ranks of every axis against HF's class, one sample at a time: losses, every gradient, weights."""

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
from flowtrain.data.positions import grid_positions
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.actions import schedule_text
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleArrays, SampleText, build_batch, pack_texts
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.e2e.oracle import backbone_name, is_of_tower
from tests.qwen3_vl import PROCESSOR, TEXT, VISION, stock_inputs
from tests.training.ranks import CPU, random_lists, relative_difference, run_ranks
from tests.training.test_internvl import STEPS, Found, plan_of, slots_of
from tests.training.test_parallel import but_at_night, shape

pytestmark = pytest.mark.processes

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"


@dataclass(frozen=True)
class Case:
    """How Qwen3-VL is trained; trains_tower: in the monolithic mode. seed: of random action lists, with parts."""

    mode: str = "decoupled"
    trains_tower: bool = False
    place: str = "first"
    freeze: tuple[str, ...] = ()
    backbone: tuple[tuple[str, Any], ...] = ()
    seed: int | None = None

    @property
    def config(self) -> RunConfig:
        encoder = {"config": VISION, "image_processor": PROCESSOR, "trainable": self.trains_tower}
        return RunConfig.model_validate(
            {
                "name": "qwen3-vl",
                "seed": 5,
                "mode": self.mode,
                "model": {"family": "qwen3_vl", "tokenizer": str(TOKENIZER), "freeze": self.freeze},
                "encoders": {"vision": encoder},
                "backbone": {"config": {**TEXT, "vocab_size": 4224}, **dict(self.backbone)},
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
    """Token ids with labels, and positions if there are images, int64 ``[2 or 5, T]``; its images."""

    text: np.ndarray
    images: list[Image.Image]


def sample_of(family: Qwen3VLFamily, position: int) -> Sample:
    """Images of several sizes between words; the words after them carry loss."""
    rng = np.random.default_rng(position)
    images, ids, grids = [], rng.integers(300, 4000, 3).tolist(), []
    for width, height in rng.integers(5, 120, ((2, 0, 1, 1)[position % 4], 2)).tolist():
        images.append(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
        layout = family.image_layout("vision", width, height)
        ids += [*rng.integers(300, 4000, 2).tolist(), *[family.image_token_id] * layout.num_tokens]
        grids.append(layout.grid)
    words = rng.integers(300, 4000, int(rng.integers(3, 9))).tolist()
    text = np.array([ids + words, [-100] * len(ids) + words])
    if grids:
        text = np.concatenate([text, grid_positions(text[0] == family.image_token_id, grids)])
    return Sample(text, images)


def batch_of(
    family: Qwen3VLFamily, samples: dict[int, Sample], positions: Sequence[int], with_pixels: bool
) -> PackedBatch:
    options: Any = {
        "image_token_id": family.image_token_id,
        "feature_dim": family.feature_dim("vision"),
        "dtype": torch.float32,
        "loss_normalization": "token",
        "device": CPU,
    }
    pixels = {p: [family.preprocess("vision", image) for image in samples[p].images] for p in positions}
    if family.config.mode != "monolithic":
        encoder, arrays = family.load_encoder("vision"), []
        for position, images in pixels.items():
            rows = torch.cat(encoder.encode(images)).clone() if images else None
            arrays.append(SampleArrays(position, samples[position].text, rows))
        return build_batch(arrays, **options)
    texts = [
        SampleText(p, samples[p].text, int((samples[p].text[0] == family.image_token_id).sum())) for p in positions
    ]
    tensors = tuple(torch.from_numpy(image) for images in pixels.values() for image in images)
    sizes = tuple((image.shape[1], image.shape[2]) for image in tensors)
    return replace(pack_texts(texts, **options), images=ImageBatch(sizes, tensors if with_pixels else ()))


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
        plan = plan_of(slots, samples, family.image_token_id, number)
        if case.seed is not None:
            lists = random_lists(trainer.model.partition, family.config, case.seed, plan)
            plan = replace(plan, schedules=(schedule_text(lists),) * plan.dp_size).for_replica(group.dp_rank)
        actions = trainer.begin_unit(plan)
        batches = [batch_of(family, samples, row[group.dp_rank], with_pixels) for row in slots]
        execute(actions, trainer.stages, batches.__getitem__)
        found.results.append(trainer.finish_unit())
    found.weights = full(trainer.model, gradients=False)
    return found


def family_of(case: Case) -> Qwen3VLFamily:
    family = family_from_config(case.config)
    assert isinstance(family, Qwen3VLFamily)
    return family


@cache
def oracle_of(
    trains_tower: bool, freeze: tuple[str, ...]
) -> tuple[list[float], list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Losses, gradients and weights of HF's class: unpacked, one sample at a time."""
    torch.set_num_threads(1)
    family = family_of(Case("monolithic", trains_tower, freeze=freeze))
    model, losses, gradients = family.load_joined().train(), [], []
    named = {}
    for name, parameter in model.named_parameters():
        ours = backbone_name(name)
        trained = trains_tower if is_of_tower(name) else not (ours.startswith("connector.") and "connector" in freeze)
        parameter.requires_grad_(trained)
        if trained:
            named[ours] = parameter
    optimizer = torch.optim.SGD(named.values(), lr=family.config.training.learning_rate)
    for step in STEPS:
        samples = [sample_of(family, p) for row in step for held in row for p in held]
        num_targets = sum(int((sample.text[1, 1:] != -100).sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            ids, labels = (torch.from_numpy(row)[None] for row in sample.text[:2])
            inputs = stock_inputs(sample.images, ids, family.image_token_id)
            mean = model(input_ids=ids, labels=labels, use_cache=False, **inputs).loss
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
    losses, gradients, weights = oracle_of(case.trains_tower, case.freeze)
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
CONNECTOR = ("connector",)
CASES: dict[Degrees, list[Case]] = {
    Degrees(): [
        *(Case(mode, trained) for mode, trained in MODES),
        *(Case(mode, trained, freeze=CONNECTOR) for mode, trained in MODES),
    ],
    Degrees(dp=2): [
        *(Case(mode, trained) for mode, trained in MODES),
        Case(freeze=CONNECTOR),
        Case("monolithic", True, backbone=(("activation_checkpointing", "full"),)),
    ],
    Degrees(pp=2): [
        Case(),
        Case(freeze=CONNECTOR),
        *(Case("monolithic", trained, place) for trained in (False, True) for place in ("first", "mixed", "own")),
        *(Case("monolithic", True, place, seed=seed) for seed, place in enumerate(("first", "mixed", "own"))),
    ],
    Degrees(pp=3): [Case(), Case("monolithic", True, "mixed"), Case("monolithic", True, "own")],
    Degrees(tp=2): [
        Case(mode, trained, backbone=(("sequence_parallel", split),), freeze=freeze)
        for (mode, trained), split, freeze in product(MODES, (True, False), ((), CONNECTOR))
    ],
    Degrees(pp=2, tp=2): [Case(), Case("monolithic", True, "mixed")],
}


@pytest.mark.parametrize("degrees", but_at_night(CASES, [Degrees(tp=2)]), ids=shape)
def test_training_equals_a_plain_loop(degrees: Degrees) -> None:
    of_ranks = run_ranks(degrees, CASES[degrees], train)
    for case, outcomes in zip(CASES[degrees], zip(*of_ranks, strict=True), strict=True):
        try:
            check(outcomes, case)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error
