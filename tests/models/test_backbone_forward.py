"""Packed forward and backward against HF's own Llava class, one sample at a time, unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flowtrain.data.images import tiles_of
from flowtrain.models.backbone import Backbone
from flowtrain.models.export import joined_name
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.actions import MemoryStrategy

TOLERANCE = 1e-5


def reference_run(family: Family, samples: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss (weighted sum of token losses) and gradients of HF's Llava over the samples one by one."""
    model = family.load_joined().train()
    total = 0.0
    for sample in samples:
        inputs: dict[str, Tensor] = {}
        if sample.images:
            tiles = [tile for image in sample.images for tile in tiles_of(family.preprocess("vision", image))]
            inputs["pixel_values"] = torch.stack([torch.from_numpy(tile) for tile in tiles])
        num_targets = sum(label != -100 for label in sample.labels[1:])
        mean = model(input_ids=torch.tensor([sample.input_ids]), labels=torch.tensor([sample.labels]), **inputs).loss
        loss = mean * num_targets * sample.weight
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(backbone: Backbone, expected: Mapping[str, Tensor]) -> None:
    """Every parameter's gradient, by the norm of the difference; a missing one counts as zero."""
    seen = set()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        reference = expected.get(joined_name(name, "model"), torch.zeros_like(parameter))
        seen.add(joined_name(name, "model"))
        difference = (parameter.grad - reference).norm()
        assert difference <= TOLERANCE * max(reference.norm().item(), 1e-3), (name, difference, reference.norm())
    assert {name for name in expected if "vision_tower" not in name} <= seen


@pytest.mark.parametrize("language", ["qwen3", "llama"])
def test_packed_equals_unpacked_hf_llava(make_config, language_configs, samples, pack, language):
    family = family_from_config(make_config(backbone={"config": language_configs[language]}))
    chosen = samples(family)
    backbone = family.load_backbone()
    loss = backbone(**pack(chosen, family))
    loss.backward()
    expected_loss, expected_gradients = reference_run(family, chosen)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_equal(backbone, expected_gradients)


def test_activation_checkpointing_recomputes_and_changes_nothing(make_config, language_configs, samples, pack):
    config = language_configs["qwen3"]
    plain = family_from_config(make_config(backbone={"config": config}))
    batch = pack(samples(plain), plain)
    expected = plain.load_backbone()
    expected_loss = expected(**batch)
    expected_loss.backward()

    checkpointed = make_config(backbone={"config": config, "activation_checkpointing": "full"})
    backbone = family_from_config(checkpointed).load_backbone()
    calls = []
    backbone.decoder_layers[0].self_attn.register_forward_pre_hook(lambda module, args: calls.append(1))
    loss = backbone(**batch)
    loss.backward()
    assert len(calls) == 2, "the layer was not recomputed"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for (name, parameter), reference in zip(backbone.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(parameter.grad, reference.grad, rtol=1e-4, atol=1e-6), name


def test_text_only_microbatch_gives_the_connector_zero_gradients(make_config, sample_of, pack):
    family = family_from_config(make_config())
    backbone = family.load_backbone()
    backbone(**pack([sample_of(family, [], 10)], family)).backward()
    for name, parameter in backbone.connector.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name
    assert backbone.language_model.get_input_embeddings().weight.grad.count_nonzero() > 0


def test_weightless_microbatch_gives_zero_loss_and_zero_gradients(make_config):
    family = family_from_config(make_config())
    backbone = family.load_backbone()
    loss = backbone(
        input_ids=torch.zeros(1, dtype=torch.int64),
        targets=torch.full((1,), -100),
        weights=torch.zeros(1),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        features=torch.zeros(0, family.feature_dim("vision")),
        feature_index=torch.zeros(0, dtype=torch.int64),
    )
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() == 0, name


def test_merge_leaves_image_placeholders_without_embedding_gradient(make_config, sample_of, pack):
    family = family_from_config(
        make_config(
            backbone={
                "config": {
                    "model_type": "llama",
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "vocab_size": 41,
                }
            }
        )
    )
    backbone = family.load_backbone()
    backbone(**pack([sample_of(family, [(28, 28)], 8)], family)).backward()
    gradient = backbone.language_model.get_input_embeddings().weight.grad
    assert gradient[family.image_token_id].count_nonzero() == 0
    assert backbone.connector.linear_1.weight.grad.count_nonzero() > 0


def test_given_positions_are_used(make_config, sample_of, pack):
    """Rotary embeddings see distances only, so that packed equality alone would not notice other offsets."""
    family = family_from_config(make_config())
    backbone = family.load_backbone()
    batch = pack([sample_of(family, [(28, 28)], 8)], family)
    loss = backbone(**batch).item()
    shifted = backbone(**{**batch, "position_ids": batch["position_ids"] + 5}).item()
    stretched = backbone(**{**batch, "position_ids": batch["position_ids"] * 3}).item()
    assert shifted == pytest.approx(loss, rel=1e-5)
    assert stretched != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("frozen", ["connector", "backbone"])
def test_frozen_modules_get_no_gradient(make_config, sample_of, pack, frozen):
    family = family_from_config(make_config(model={"freeze": [frozen]}))
    backbone = family.load_backbone()
    backbone(**pack([sample_of(family, [(28, 28)], 8)], family)).backward()
    for name, parameter in backbone.named_parameters():
        is_frozen = name.startswith("connector.") == (frozen == "connector")
        assert (parameter.grad is None) == is_frozen, name


def test_every_process_draws_the_same_weights(make_config):
    torch.manual_seed(1)
    first = family_from_config(make_config()).load_backbone().state_dict()
    torch.manual_seed(2)
    family = family_from_config(make_config())
    family.load_encoder("vision")
    second = family.load_backbone().state_dict()
    other = family_from_config(make_config(seed=8)).load_backbone().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["connector.linear_1.weight"], other["connector.linear_1.weight"])


def test_bf16_under_fsdp_mixed_precision(make_config, samples, pack, single_process_group):
    family = family_from_config(make_config(model={"dtype": "bfloat16"}))
    batch = pack(samples(family), family)
    assert batch["features"].dtype == torch.bfloat16
    full = family.load_backbone()
    expected = full(**batch).item()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    backbone = family.load_backbone()
    backbone.memory = MemoryStrategy.RECOMPUTE
    for layer in backbone.decoder_layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(backbone, mp_policy=policy)
    loss = backbone(**batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.02)
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.to_local().isfinite().all(), name
