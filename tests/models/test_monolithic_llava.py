"""A trained tower inside the pipeline against HF's own Llava class with images, and its way into an export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from flowtrain.config.run import RunConfig
from flowtrain.controller.export import CheckpointedWeights
from flowtrain.data.images import tiles_of
from flowtrain.errors import ConfigError
from flowtrain.models.export import joined_name
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleText, pack_texts
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from tests.models.test_backbone_forward import reference_run

TOLERANCE = 1e-5
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    group = init_backbone_group(0, Degrees(), CPU)
    yield group
    group.close()


def config_with(make_config: Any, tower: dict[str, Any], **sections: Any) -> RunConfig:
    encoder = {"config": {**tower, "num_hidden_layers": 3}, "feature_layer": -2, "trainable": True}
    return make_config(
        mode="monolithic",
        encoders={"vision": encoder},
        training={"max_steps": 10, "learning_rates": {"encoders": 0.0}},
        **sections,
    )


def packed(family: Family, samples: list[Any]) -> PackedBatch:
    texts, images = [], []
    for position, sample in enumerate(samples):
        text = np.stack([sample.input_ids, sample.labels])
        texts.append(SampleText(position, text, int((text[0] == family.image_token_id).sum())))
        arrays = [tile for image in sample.images for tile in tiles_of(family.preprocess("vision", image))]
        images += [torch.from_numpy(array) for array in arrays]
    batch = pack_texts(
        texts,
        image_token_id=family.image_token_id,
        feature_dim=family.feature_dim("vision"),
        dtype=torch.float32,
        loss_normalization="token",
        device=CPU,
    )
    return replace(batch, images=ImageBatch(tuple((i.shape[1], i.shape[2]) for i in images), tuple(images)))


def plan_of(batches: list[PackedBatch]) -> StepPlan:
    rows = tuple(
        (Microbatch(k, 0, (PlannedSample(k, batch.num_tokens, 0, batch.num_target_tokens),), 1.0),)
        for k, batch in enumerate(batches)
    )
    return StepPlan.of_slots(Unit(1, UnitKind.TRAIN, 1, 0, len(batches)), 4096, rows, ())


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
def test_a_step_has_the_gradients_of_hf_llava_with_images(
    make_config: Any, tower_configs: Any, samples: Any, group: BackboneGroup, tower: str
) -> None:
    family = family_from_config(config_with(make_config, tower_configs[tower]))
    chosen = [replace(sample, weight=1.0) for sample in samples(family)]
    batches = [packed(family, chosen[:3]), packed(family, chosen[3:])]
    found: dict[str, Tensor] = {}

    def take(model: Any) -> None:
        found.update({name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()})

    trainer = Trainer(family.config, family, group, num_steps=10, before_optimizer=take)
    first = {name: tensor.full_tensor().clone() for name, tensor in trainer.model.named_parameters()}
    plan = plan_of(batches)
    execute(trainer.begin_unit(plan), trainer.stages, lambda index: batches[index])
    result = trainer.finish_unit()

    total, expected = reference_run(family, chosen)
    num_targets = sum(batch.num_target_tokens for batch in batches)
    assert result.loss * num_targets == pytest.approx(total, rel=1e-6)
    names = {name: hf_name(name) for name in found}
    assert set(names.values()) == expected.keys()
    for name, gradient in found.items():
        reference = expected[names[name]] / num_targets
        if name.endswith("k_proj.bias") and "tower" in name:  # it changes no attention: what there is is rounding
            assert gradient.norm() < 1e-4 * found[name.replace("k_proj", "q_proj")].norm(), name
            continue
        difference = (gradient - reference).norm()
        assert difference <= TOLERANCE * max(reference.norm().item(), 1e-3), (name, difference, reference.norm())
    changed = {
        n.split(".")[0] for n, p in trainer.model.named_parameters() if not torch.equal(p.full_tensor(), first[n])
    }
    assert changed == {"connector", "language_model"}, "learning_rates.encoders is 0"


def hf_name(name: str) -> str:
    tower = "encoders.vision.tower."
    return f"model.vision_tower.{name.removeprefix(tower)}" if name.startswith(tower) else joined_name(name, "model")


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2"])
def test_an_export_has_the_trained_tower(make_config: Any, tower_configs: Any, tmp_path: Any, tower: str) -> None:
    family = family_from_config(config_with(make_config, tower_configs[tower]))
    shapes = {name: tensor.shape for name, tensor in family.encoder_skeleton("vision").state_dict().items()}
    trained = {f"encoders.vision.{name}": torch.rand(shape) for name, shape in shapes.items()}
    family.export(family.load_backbone().state_dict() | trained, tmp_path)
    exported = LlavaForConditionalGeneration.from_pretrained(tmp_path).model.vision_tower.state_dict()
    first = family.load_joined().model.vision_tower.state_dict()
    assert exported.keys() == first.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, trained.get(f"encoders.vision.tower.{name}", first[name])), name


def test_a_checkpoint_with_a_trained_tower_is_exported(
    make_config: Any, tower_configs: Any, tmp_path: Any, group: BackboneGroup
) -> None:
    config = config_with(make_config, tower_configs["clip"])
    family = family_from_config(config)
    trainer = Trainer(config, family, group, num_steps=10)
    for _, parameter in trainer.model.named_parameters():
        parameter.data.mul_(1.5)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    weights = CheckpointedWeights(family, config, tmp_path / "checkpoint")
    family.export(weights.state, tmp_path / "export")
    weights.check_frozen()
    exported = LlavaForConditionalGeneration.from_pretrained(tmp_path / "export").state_dict()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(exported[hf_name(name)], parameter.full_tensor()), name


def test_a_tower_that_ranks_cannot_split_is_refused(make_config: Any, tower_configs: Any) -> None:
    """The tower has two heads; the language model four."""
    sections = {"mode": "monolithic", "encoders": {"vision": {"config": tower_configs["siglip"]}}}
    backbone = {"backbone": {"config": {**make_config().backbone.config, "num_key_value_heads": 4}}}
    family_from_config(make_config(**backbone)).check_tensor_parallel(4)
    with pytest.raises(ConfigError, match=r"backbone\.tensor_parallel_size \(4\) does not divide the tower's num_att"):
        family_from_config(make_config(**sections, **backbone)).check_tensor_parallel(4)
