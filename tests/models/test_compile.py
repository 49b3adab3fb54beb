"""Compiled decoder layers on packed microbatches of all lengths."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType

import pytest
import torch
from torch._dynamo.utils import counters

from flowtrain.errors import ConfigError
from flowtrain.models.attention_backends import torch_varlen
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.actions import MemoryStrategy
from tests.models.ranks import QWEN3, assert_close, full_gradients, make_backbone, make_batch

TWO_LAYERS = {**QWEN3, "num_hidden_layers": 2}
COMPILERS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_gradients_are_the_same_and_lengths_compile_nothing_anew(backend):
    torch.compiler.reset()
    counters.clear()
    plain, compiled = make_backbone(TWO_LAYERS), make_backbone(TWO_LAYERS)
    compiled.compile_layers(backend)
    num_graphs = []
    for seed, lengths in enumerate([(7, 1, 12, 4), (9, 3, 5), (20, 2), (5, 5, 5, 5, 5), (30,)]):
        batch = make_batch(seed, lengths)
        for strategy in (MemoryStrategy.KEEP, MemoryStrategy.RECOMPUTE):
            for backbone in (plain, compiled):
                backbone.zero_grad()
                backbone(**batch, memory=strategy).backward()
            assert_close(full_gradients(compiled), full_gradients(plain))
            num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] == num_graphs[-1] > 0, num_graphs


def test_selective_recomputation_of_compiled_layers_is_refused(make_config, language_configs):
    backbone = {"config": language_configs["qwen3"], "compile": True, "activation_checkpointing": "selective"}
    with pytest.raises(ConfigError, match="backbone.activation_checkpointing: selective .* backbone.compile"):
        family_from_config(make_config(backbone=backbone)).load_backbone()


def test_layers_are_compiled_where_the_configuration_says_so(make_config, language_configs, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: compiled.append(kwargs) or function)
    for settings in ({}, {"compile": True}):
        family_from_config(make_config(backbone={"config": language_configs["qwen3"], **settings})).load_backbone()
    assert compiled == [{"dynamic": True, "backend": "inductor"}] * 2, "two layers, and nothing by default"


def attend_by_mask(query, key, value, cu_seqlens, scale):
    """What a variable-length kernel computes, ``[T, H, D]``, in operations that a graph can hold."""
    tokens = torch.arange(query.shape[0])
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True)
    mask = (sequence[:, None] == sequence) & (tokens[:, None] >= tokens)
    heads = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(0, 1)


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    return attend_by_mask(query, key, value, cu_q, scale)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, softmax_scale, **others):
    return attend_by_mask(q, k, v, cu_seqlens_q, softmax_scale)


@pytest.mark.parametrize("kernel", ["torch_varlen", "flash_attn"])
def test_a_layer_with_a_kernel_for_packed_sequences_is_one_graph(kernel, monkeypatch):
    """A break would leave the operations beside it alone, and end a graph in every layer."""
    monkeypatch.setattr(torch_varlen, "_KERNEL", varlen_attn)
    package = ModuleType("flash_attn")
    monkeypatch.setattr(package, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.compiler.reset()
    plain, compiled = make_backbone(TWO_LAYERS), make_backbone(TWO_LAYERS, attention=kernel)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in compiled.decoder_layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=record, fullgraph=True)
    for seed, lengths in enumerate([(7, 1, 12, 4), (9, 3, 5), (30,)]):
        for backbone in (plain, compiled):
            backbone.zero_grad()
            backbone(**make_batch(seed, lengths)).backward()
        assert_close(full_gradients(compiled), full_gradients(plain))
    assert len(graphs) == 1, "all layers and lengths share it"
