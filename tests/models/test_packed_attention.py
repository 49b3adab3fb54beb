"""Packed attention against transformers' own SDPA on each sequence alone."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowtrain.models.attention import BACKENDS, implementation_name, packed_sdpa, resolve_attention

LENGTHS = [5, 1, 9, 3]


def packed_kwargs(lengths):
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return {
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "max_seqlen": max(lengths),
        "segment_offsets": offsets,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_packed_logits_equal_unpacked_ones(backend, window, num_kv_heads):
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=num_kv_heads, use_sliding_window=window is not None, sliding_window=window,
        max_window_layers=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(config).eval()
    packed = Qwen3ForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation=implementation_name(backend)
    ).eval()
    packed.load_state_dict(plain.state_dict())
    input_ids = torch.randint(0, 32, (1, sum(LENGTHS)))
    with torch.no_grad():
        logits = packed(input_ids=input_ids, use_cache=False, **packed_kwargs(LENGTHS)).logits
        expected = torch.cat([plain(input_ids=ids).logits for ids in input_ids.split(LENGTHS, dim=1)], dim=1)
    assert torch.allclose(logits, expected, atol=1e-6)


def test_a_sequence_does_not_see_its_neighbours():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))
    output, _ = packed_sdpa(nn.Identity(), query, key, value, None, segment_offsets=[0, 3, 8])
    key[:, :, :3], value[:, :, :3] = 100.0, -100.0
    changed, _ = packed_sdpa(nn.Identity(), query, key, value, None, segment_offsets=[0, 3, 8])
    assert torch.equal(output[:, 3:], changed[:, 3:]) and not torch.equal(output[:, :3], changed[:, :3])


def test_head_counts_come_from_the_tensors():
    module = nn.Identity()
    module.num_key_value_groups = 4  # what the configuration says; this rank holds other heads
    query, key, value = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    output, _ = packed_sdpa(module, query, key, value, None, segment_offsets=[0, 6])
    assert output.shape == (1, 6, 2, 4)


def test_what_a_model_asks_for_and_the_kernel_lacks_is_refused():
    query = torch.randn(1, 2, 6, 4)
    with pytest.raises(NotImplementedError, match="softcap"):
        packed_sdpa(nn.Identity(), query, query, query, None, segment_offsets=[0, 6], softcap=30.0)


def test_auto_says_what_it_chose(caplog):
    with caplog.at_level(logging.INFO, logger="flowtrain.models.attention"):
        assert resolve_attention("auto") == "sdpa"
    assert "sdpa" in caplog.text
    caplog.clear()
    assert resolve_attention("sdpa") == "sdpa" and not caplog.text
