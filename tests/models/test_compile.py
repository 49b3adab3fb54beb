"""Compiled decoder layers on packed microbatches of all lengths."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from flowtrain.errors import ConfigError
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
