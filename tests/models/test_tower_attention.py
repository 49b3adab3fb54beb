"""Attention of towers: within each image of a row, by every kernel, and as transformers calls it."""

from __future__ import annotations

import copy
import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from flowtrain.models import tower_attention
from flowtrain.models.attention import BACKENDS
from flowtrain.models.attention_backends import flash_attn, torch_varlen
from flowtrain.models.attention_backends.base import Segments
from flowtrain.models.tower_attention import IMPLEMENTATION, packed_bidirectional
from flowtrain.models.weights import tower_class
from tests.models.operators import Operators

LENGTHS = [5, 5, 1, 9, 5, 3, 3]


def row_of(lengths, num_heads=2, num_kv_heads=2, width=8):
    torch.manual_seed(0)
    return [torch.randn(1, heads, sum(lengths), width) for heads in (num_heads, num_kv_heads, num_kv_heads)]


def one_by_one(query, key, value, lengths, scaling=None):
    """Each image alone, ``[1, T, H, D]``."""
    images = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    is_grouped = query.shape[1] != key.shape[1]
    outputs = [scaled_dot_product_attention(*image, scale=scaling, enable_gqa=is_grouped) for image in images]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sampled_from([4, 2, 1]))
def test_a_row_equals_its_images_one_by_one(lengths, num_kv_heads):
    given, alone = row_of(lengths, 4, num_kv_heads), row_of(lengths, 4, num_kv_heads)
    for tensor in (*given, *alone):
        tensor.requires_grad_()
    found = packed_bidirectional(*given, Segments(lengths), scaling=0.3)
    expected = one_by_one(*alone, lengths, 0.3)
    assert found.shape == (1, sum(lengths), 4, 8) and torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn_like(found)
    for output in (found, expected):
        (output * weights).sum().backward()
    for mine, other in zip(given, alone, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-5)


def test_an_image_does_not_see_its_neighbours():
    query, key, value = row_of(LENGTHS)
    before = packed_bidirectional(query, key, value, Segments(LENGTHS))
    key[:, :, :5], value[:, :, :5] = 100.0, -100.0
    after = packed_bidirectional(query, key, value, Segments(LENGTHS))
    assert torch.equal(before[:, 5:], after[:, 5:]) and not torch.equal(before[:, :5], after[:, :5])


def test_equal_neighbours_are_one_call():
    with Operators() as operators:
        packed_bidirectional(*row_of(LENGTHS), Segments(LENGTHS))
    assert operators.num_calls(lambda name: "scaled_dot_product" in name) == 5, "5 5, 1, 9, 5, 3 3"
    with Operators() as operators:
        packed_bidirectional(*row_of([4] * 6), Segments([4] * 6))
    assert operators.num_calls(lambda name: "scaled_dot_product" in name) == 1
    assert operators.counts["aten::cat"] == operators.counts["aten::clone"] == 0, "a batch of equal images is a view"


@given(st.lists(st.integers(1, 9), max_size=12))
def test_segments_count_their_tokens(lengths):
    segments = Segments(lengths)
    assert segments.num_tokens == sum(lengths) and segments.max_length == max(lengths, default=0)
    assert [length for count, length in segments.runs for _ in range(count)] == lengths
    assert all(before != after for (_, before), (_, after) in pairwise(segments.runs))
    offsets = segments.offsets_on(torch.device("cpu"))
    assert offsets.dtype == torch.int32 and offsets.diff().tolist() == lengths and offsets[0] == 0
    assert segments.offsets_on(torch.device("cpu")) is offsets


@pytest.mark.parametrize("kind", ["siglip_vision_model", "clip_vision_model", "dinov2", "vit"])
def test_without_segments_a_tower_computes_as_with_sdpa(kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    plain = tower_class(config := AutoConfig.for_model(kind, **sizes))._from_config(config).eval()
    ours = copy.deepcopy(plain)
    plain.set_attn_implementation("sdpa")
    ours.set_attn_implementation(IMPLEMENTATION)
    images = torch.randn(3, 3, 28, 28)
    with torch.no_grad():
        assert torch.equal(ours(images).last_hidden_state, plain(images).last_hidden_state)


def attend_as_transformers(module, lengths=LENGTHS, **options):
    return tower_attention.tower_attention(module, *row_of(lengths), Segments(lengths), **options)


def test_what_a_model_asks_for_and_the_kernel_lacks_is_refused():
    with pytest.raises(NotImplementedError, match="softcap"):
        attend_as_transformers(nn.Identity(), softcap=30.0)
    module = nn.Identity()
    module.is_causal = True
    with pytest.raises(AssertionError, match="causal"):
        attend_as_transformers(module)
    with pytest.raises(AssertionError):
        packed_bidirectional(*row_of([4, 5]), Segments([4, 4]))


def test_kernels_that_cannot_do_it_are_passed_over(monkeypatch):
    """None of them but SDPA knows dropout and heads of any width."""

    def refuse(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr(tower_attention, "_kernel_for", lambda device, dtype: "torch_varlen")
    monkeypatch.setattr(torch_varlen, "_KERNEL", refuse)
    packed_bidirectional(*row_of([4, 5], width=6), Segments([4, 5]))
    packed_bidirectional(*row_of([4, 5]), Segments([4, 5]), dropout=0.5)
    with pytest.raises(AssertionError, match="called"):
        packed_bidirectional(*row_of([4, 5]), Segments([4, 5]))


def kernel_result(query, key, value, offsets, scale):
    """What a variable-length kernel computes, ``[T, H, D]``."""
    lengths = offsets.diff().tolist()
    return one_by_one(*(t.transpose(0, 1)[None] for t in (query, key, value)), lengths, scale)[0]


def new_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False):
    """Interface of torch 2.13's ``varlen_attn``."""
    assert window_size == (-1, -1) and enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_q is cu_k and max_q == max_k == max(LENGTHS)
    return kernel_result(query, key, value, cu_q, scale)


def causal_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, *, scale=None):
    """Interface before that."""
    assert not is_causal and query.shape == key.shape and max_q == max_k == max(LENGTHS)
    return kernel_result(query, key, value, cu_q, scale)


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size
):
    """Interface of the flash-attn package."""
    assert not causal and window_size == (-1, -1) and dropout_p == 0.0 and max_seqlen_q == max_seqlen_k == max(LENGTHS)
    return kernel_result(q, k, v, cu_seqlens_q, softmax_scale)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("torch_varlen", new_varlen_attn),
        ("torch_varlen", causal_varlen_attn),
        ("flash_attn", flash_attn_varlen_func),
    ],
)
def test_variable_length_kernels_are_called_by_their_interfaces(monkeypatch, name, kernel, num_kv_heads):
    """The kernels themselves need a GPU: here only what goes in and comes out."""
    monkeypatch.setattr(torch_varlen, "_KERNEL", kernel)
    monkeypatch.setattr(torch_varlen, "_PARAMETERS", frozenset(inspect.signature(kernel).parameters))
    monkeypatch.setattr(flash_attn, "_kernel", lambda: kernel)
    query, key, value = row_of(LENGTHS, 4, num_kv_heads)
    found = BACKENDS[name].bidirectional(query, key, value, Segments(LENGTHS), scaling=0.3, dropout=0.0)
    assert torch.allclose(found, one_by_one(query, key, value, LENGTHS, 0.3), atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernels need a CUDA device")
@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_variable_length_kernels_on_a_gpu(backend):
    device = torch.device("cuda")
    reason = BACKENDS[backend].why_not(device, torch.bfloat16)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    inputs = [tensor.to(device, torch.bfloat16) for tensor in row_of(LENGTHS, 4, 4, 64)]
    results = []
    for name in (backend, "sdpa"):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = BACKENDS[name].bidirectional(*leaves, Segments(LENGTHS), scaling=0.1, dropout=0.0)
        output.float().pow(2).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found.float(), expected.float(), atol=0.03, rtol=0.03)
