"""Packed attention against transformers' own SDPA on each sequence alone."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowtrain.errors import ConfigError
from flowtrain.models.attention import BACKENDS, implementation_name, resolve_attention
from flowtrain.models.attention_backends import flash_attn, torch_varlen
from flowtrain.models.attention_backends.base import SegmentOffsets
from flowtrain.models.attention_backends.sdpa import packed_sdpa
from tests.models.operators import Operators

LENGTHS = [5, 1, 9, 3]


def packed_kwargs(lengths):
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return {
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "max_seqlen": max(lengths),
        "segment_offsets": SegmentOffsets(offsets),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_packed_logits_equal_unpacked_ones(window, num_kv_heads):
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=num_kv_heads, use_sliding_window=window is not None, sliding_window=window,
        max_window_layers=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(config).eval()
    packed = Qwen3ForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation=implementation_name("sdpa")
    ).eval()
    packed.load_state_dict(plain.state_dict())
    input_ids = torch.randint(0, 32, (1, sum(LENGTHS)))
    with torch.no_grad():
        logits = packed(input_ids=input_ids, use_cache=False, **packed_kwargs(LENGTHS)).logits
        expected = torch.cat([plain(input_ids=ids).logits for ids in input_ids.split(LENGTHS, dim=1)], dim=1)
    assert torch.allclose(logits, expected, atol=1e-6)


def test_many_short_sequences_fill_no_gradient_each():
    """Slicing them one by one would: 64 gradients of the whole input, and time quadratic in the sequences."""
    query, key, value = (torch.randn(1, 2, 64 * 4, 8, requires_grad=True) for _ in range(3))
    output, _ = packed_sdpa(
        nn.Identity(), query, key, value, None, segment_offsets=SegmentOffsets(range(0, 64 * 4 + 1, 4))
    )
    with Operators() as operators:
        output.sum().backward()
    assert sum(size >= query.numel() for size in operators.sizes) < 16


def test_a_sequence_does_not_see_its_neighbours():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))
    output, _ = packed_sdpa(nn.Identity(), query, key, value, None, segment_offsets=SegmentOffsets([0, 3, 8]))
    key[:, :, :3], value[:, :, :3] = 100.0, -100.0
    changed, _ = packed_sdpa(nn.Identity(), query, key, value, None, segment_offsets=SegmentOffsets([0, 3, 8]))
    assert torch.equal(output[:, 3:], changed[:, 3:]) and not torch.equal(output[:, :3], changed[:, :3])


def test_head_counts_come_from_the_tensors():
    module = nn.Identity()
    module.num_key_value_groups = 4  # what the configuration says; this rank holds other heads
    query, key, value = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    output, _ = packed_sdpa(module, query, key, value, None, segment_offsets=SegmentOffsets([0, 6]))
    assert output.shape == (1, 6, 2, 4)


def test_what_a_model_asks_for_and_the_kernel_lacks_is_refused():
    query = torch.randn(1, 2, 6, 4)
    with pytest.raises(NotImplementedError, match="softcap"):
        packed_sdpa(nn.Identity(), query, query, query, None, segment_offsets=SegmentOffsets([0, 6]), softcap=30.0)


CPU = torch.device("cpu")


def test_auto_says_what_it_chose_and_why(caplog):
    with caplog.at_level(logging.INFO, logger="flowtrain.models.attention"):
        assert resolve_attention("auto", CPU, torch.bfloat16) == "sdpa"
    assert len(caplog.records) == 1
    assert "auto -> sdpa on cpu" in caplog.text and "flash_attn: it needs a CUDA device, not cpu" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="flowtrain.models.attention"):
        assert resolve_attention("sdpa", CPU, torch.float32) == "sdpa"
    assert "sdpa on cpu, as configured" in caplog.text


@pytest.mark.parametrize("requested", ["flash_attn", "torch_varlen"])
def test_a_backend_that_cannot_run_here_is_refused(requested):
    with pytest.raises(ConfigError, match=f"backbone.attention: {requested} .* CUDA device, not cpu, or choose auto"):
        resolve_attention(requested, CPU, torch.bfloat16)


@pytest.mark.parametrize(("installed", "chosen"), [(True, "flash_attn"), (False, "torch_varlen")])
def test_auto_takes_flash_attn_where_it_is_installed(installed, chosen, monkeypatch, caplog):
    def kernel():
        if not installed:
            raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(flash_attn, "_kernel", kernel)
    monkeypatch.setattr(flash_attn, "why_no_flash_kernel", lambda device, dtype: None)
    monkeypatch.setitem(BACKENDS, "torch_varlen", replace(torch_varlen.BACKEND, why_not=lambda device, dtype: None))
    with caplog.at_level(logging.INFO, logger="flowtrain.models.attention"):
        assert resolve_attention("auto", torch.device("cuda"), torch.bfloat16) == chosen
    way_out = "pip install --no-build-isolation 'flowtrain[flash-attn]'"
    assert (way_out in caplog.text) != installed


def varlen_reference(query, key, value, cu_seqlens, scale, window):
    """What a variable-length kernel computes, ``[T, H, D]``, with explicit masks."""
    offsets, outputs = cu_seqlens.tolist(), []
    groups = query.shape[1] // key.shape[1]
    for start, stop in pairwise(offsets):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        mask = (distance >= 0) & (distance <= (window if window >= 0 else stop))
        keys, values = (t[start:stop].repeat_interleave(groups, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], keys) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def new_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False):
    """Interface of torch 2.13's ``varlen_attn``."""
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1]) and max_q == max_k == max(LENGTHS)
    return varlen_reference(query, key, value, cu_q, scale, window_size[0])


def windowed_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size=(-1, -1)):
    """Interface before that: as many heads for all three."""
    assert window_size[1] == 0 and query.shape == key.shape
    return varlen_reference(query, key, value, cu_q, scale, window_size[0])


def causal_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, *, scale=None):
    """Interface before that: no window."""
    assert is_causal and query.shape == key.shape
    return varlen_reference(query, key, value, cu_q, scale, -1)


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size
):
    """Interface of the flash-attn package."""
    assert causal and window_size[1] in (-1, 0) and dropout_p == 0.0 and max_seqlen_q == max_seqlen_k == max(LENGTHS)
    return varlen_reference(q, k, v, cu_seqlens_q, softmax_scale, window_size[0])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("torch_varlen", new_varlen_attn),
        ("torch_varlen", windowed_varlen_attn),
        ("torch_varlen", causal_varlen_attn),
        ("flash_attn", flash_attn_varlen_func),
    ],
)
def test_variable_length_kernels_are_called_by_their_interfaces(monkeypatch, name, kernel, window):
    """The kernels themselves need a GPU: here only what goes in and comes out, against SDPA per sequence."""
    monkeypatch.setattr(torch_varlen, "_KERNEL", kernel)
    monkeypatch.setattr(torch_varlen, "_PARAMETERS", frozenset(inspect.signature(kernel).parameters))
    monkeypatch.setattr(flash_attn, "_kernel", lambda: kernel)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 8) for heads in (4, 2, 2))
    kwargs = {**packed_kwargs(LENGTHS), "scaling": 0.3, "sliding_window": window}
    attend = BACKENDS[name].attend
    if kernel is causal_varlen_attn and window is not None:
        with pytest.raises(NotImplementedError, match="sliding window"):
            attend(nn.Identity(), query, key, value, None, **kwargs)
        return
    output, _ = attend(nn.Identity(), query, key, value, None, **kwargs)
    expected, _ = packed_sdpa(nn.Identity(), query, key, value, None, **kwargs)
    assert output.shape == (1, sum(LENGTHS), 4, 8) and torch.allclose(output, expected, atol=1e-6)


def test_this_torch_has_an_interface_that_is_known():
    parameters = torch_varlen._PARAMETERS
    assert {"scale"} <= parameters and ("window_size" in parameters or "is_causal" in parameters)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernels need a CUDA device")
@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_variable_length_kernels_on_a_gpu(backend):
    device = torch.device("cuda")
    reason = BACKENDS[backend].why_not(device, torch.bfloat16)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, sum(LENGTHS), 64, device=device, dtype=torch.bfloat16) for h in (4, 2, 2)]
    kwargs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in packed_kwargs(LENGTHS).items()}
    results = []
    for attend in (BACKENDS[backend].attend, packed_sdpa):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output, _ = attend(nn.Identity(), *leaves, None, scaling=0.1, **kwargs)
        output.float().pow(2).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found.float(), expected.float(), atol=0.03, rtol=0.03)
