"""Pipeline stages: names, parts, and that together they compute what the whole does."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from flowtrain.costs.training_setup import CPU_PROBABILITIES, LOSS_CHUNK_TOKENS
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.loss import CHUNK_TOKENS, CPU_BLOCK_NUMBERS
from flowtrain.models.stage import take_stage, tied_names
from flowtrain.pipeline.partition import split_layers

TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def whole_backbone() -> Backbone:
    """Layers that differ in kind, and one pair of tied weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=TYPES,
        use_sliding_window=True,
        sliding_window=3,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation_name("sdpa"))
    return Backbone(Connector(6, 16), model)


def batch() -> dict[str, torch.Tensor | int]:
    targets = torch.tensor([5, 6, -100, 7, 8, 9, 10, 11])
    return {
        "input_ids": torch.arange(8),
        "targets": targets,
        "weights": (targets >= 0).float(),
        "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]),
        "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32),
        "max_seqlen": 5,
        "features": torch.ones(2, 6),
        "feature_index": torch.tensor([0, 4]),
    }


def test_stages_compute_what_the_whole_does_under_its_names() -> None:
    whole = whole_backbone()
    expected = whole(**batch())
    for num_stages in range(1, 5):
        stages = [
            take_stage(whole, layers, is_first=number == 0, is_last=number == num_stages - 1)
            for number, layers in enumerate(split_layers(4, num_stages))
        ]
        hidden = None
        for stage in stages:
            hidden = stage(**batch(), hidden=hidden)
        assert torch.equal(hidden, expected)
        names = [name for stage in stages for name, _ in stage.named_parameters()]
        tied = tied_names(whole)
        assert {tied.get(name, name) for name in names} == {name for name, _ in whole.named_parameters()}
        assert [stage.is_first_stage for stage in stages] == [k == 0 for k in range(num_stages)]
        assert [stage.is_last_stage for stage in stages] == [k == num_stages - 1 for k in range(num_stages)]


def test_a_stage_knows_the_kinds_of_its_own_layers() -> None:
    whole = whole_backbone()
    stage = take_stage(whole, range(1, 3), is_first=False, is_last=False)
    assert stage.language_model.base_model.config.layer_types == TYPES[1:3]
    assert whole.language_model.config.layer_types == TYPES


def test_memory_is_predicted_with_the_loss_as_it_is() -> None:
    assert (LOSS_CHUNK_TOKENS, CPU_PROBABILITIES) == (CHUNK_TOKENS, CPU_BLOCK_NUMBERS)
