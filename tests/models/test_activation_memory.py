"""Memory strategies: the same gradients from less, call by call."""

from __future__ import annotations

import pytest
import torch

from flowtrain.config.model import BackboneConfig
from flowtrain.models.activation_memory import applied
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from flowtrain.pipeline.configured import configured_strategy
from tests.models.operators import Operators
from tests.models.ranks import QWEN3, assert_close, full_gradients, make_backbone, make_batch

KEEP, RECOMPUTE, SELECTIVE = MemoryStrategy.KEEP, MemoryStrategy.RECOMPUTE, MemoryStrategy.SELECTIVE
OFFLOAD = MemoryStrategy.OFFLOAD
EVERY_2, EVERY_3 = (MemoryStrategy(MemoryKind.RECOMPUTE, every) for every in (2, 3))
ALL = [KEEP, RECOMPUTE, SELECTIVE, EVERY_2, EVERY_3, OFFLOAD]


def run(backbone, strategy):
    """Gradients of a call, and the operators of its forward and backward."""
    backbone.zero_grad()
    with Operators() as operators:
        backbone(**make_batch(), memory=strategy).backward()
    return full_gradients(backbone), operators


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_gradients_are_the_same(strategy):
    backbone = make_backbone(QWEN3)
    expected, _ = run(backbone, KEEP)
    found, _ = run(backbone, strategy)
    assert_close(found, expected, tolerance=1e-6)


@pytest.mark.parametrize(
    ("strategy", "recomputed"),
    [(KEEP, []), (RECOMPUTE, [0, 1, 2]), (EVERY_2, [0, 2]), (EVERY_3, [0]), (OFFLOAD, [])],
)
def test_which_layers_run_twice(strategy, recomputed):
    backbone, runs = make_backbone(QWEN3), []
    for index, layer in enumerate(backbone.decoder_layers):
        layer.self_attn.register_forward_pre_hook(lambda module, args, index=index: runs.append(index))
    run(backbone, strategy)
    assert sorted(runs) == sorted([0, 1, 2, *recomputed])


def test_selective_repeats_neither_products_nor_attention():
    backbone = make_backbone(QWEN3)
    (_, kept), (_, selective), (_, recomputed) = (run(backbone, strategy) for strategy in (KEEP, SELECTIVE, RECOMPUTE))
    assert selective.num_products == kept.num_products < recomputed.num_products
    attention = [operators.num_calls(is_attention) for operators in (kept, selective, recomputed)]
    assert attention[0] == attention[1] < attention[2]
    assert selective.counts["aten::rsqrt"] > kept.counts["aten::rsqrt"], "norms are recomputed"


def is_attention(name):
    """Whether an operator is a forward of SDPA."""
    return "scaled_dot_product" in name and "backward" not in name


def saved_nbytes(strategy):
    """Bytes that the graph of a call holds on to, each storage once, weights left out."""
    backbone, storages = make_backbone(QWEN3), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.parameters()}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = backbone(**make_batch(lengths=(40, 60)), memory=strategy)
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)


def test_less_is_kept():
    kept, every_2, recomputed = saved_nbytes(KEEP), saved_nbytes(EVERY_2), saved_nbytes(RECOMPUTE)
    assert recomputed < every_2 < kept
    assert recomputed < kept / 2


def test_a_strategy_leaves_no_trace():
    backbone = make_backbone(QWEN3)
    layers = backbone.decoder_layers
    layers[1].forward = own = layers[1].forward
    with pytest.raises(ValueError, match="within"), applied(RECOMPUTE, layers):
        assert all("forward" in vars(layer) for layer in layers)
        raise ValueError("within")
    assert ["forward" in vars(layer) for layer in layers] == [False, True, False]
    assert layers[1].forward is own


def test_without_gradients_nothing_is_wrapped():
    layers = make_backbone(QWEN3).decoder_layers
    with torch.no_grad(), applied(RECOMPUTE, layers):
        assert not any("forward" in vars(layer) for layer in layers)


def test_a_call_that_does_not_say_follows_the_backbone():
    backbone = make_backbone(QWEN3)
    _, expected = run(backbone, RECOMPUTE)
    backbone.memory = RECOMPUTE
    _, found = run(backbone, None)
    assert found.counts == expected.counts


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({}, KEEP),
        ({"activation_checkpointing": "full"}, RECOMPUTE),
        ({"activation_checkpointing": "selective"}, SELECTIVE),
        ({"activation_checkpointing": "every_n", "checkpoint_every": 3}, EVERY_3),
        ({"activation_checkpointing": "offload"}, OFFLOAD),
    ],
)
def test_what_the_configuration_stands_for(settings, strategy):
    assert configured_strategy(BackboneConfig(path="unused", **settings)) == strategy
