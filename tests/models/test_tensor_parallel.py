"""Tensor parallel backbones against the plain one: loss and every parameter's gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from flowtrain.errors import ConfigError
from flowtrain.models.stage import take_stage
from flowtrain.models.tensor_parallel import parallelize
from flowtrain.pipeline.actions import MemoryStrategy
from tests.models.operators import Operators
from tests.models.ranks import QWEN3, assert_close, full_gradients, make_backbone, make_batch, run_ranks

pytestmark = pytest.mark.processes

UNTIED = {**QWEN3, "tie_word_embeddings": False}
LLAMA = {**UNTIED, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
QWEN2 = {**UNTIED, "model_type": "qwen2", "num_hidden_layers": 2}
GROUPED = {**QWEN3, "num_key_value_heads": 2}
UNEVEN = {**QWEN3, "vocab_size": 35}
UNEVEN_UNTIED = {**UNTIED, "vocab_size": 35}


def plain_run(values, frozen=(), batches=(0,)):
    """Loss and gradients of the plain backbone, summed over batches."""
    backbone = make_backbone(values, frozen=frozen)
    loss = torch.stack([backbone(**make_batch(seed, vocab_size=values["vocab_size"])) for seed in batches]).sum()
    loss.backward()
    return loss.item(), full_gradients(backbone)


def parallel_run(values, frozen):
    """The same on one rank of a tensor parallel group."""
    backbone = make_backbone(values, frozen=frozen)
    parallelize(backbone, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    loss = backbone(**make_batch(vocab_size=values["vocab_size"]))
    loss.backward()
    return loss.item(), full_gradients(backbone)


@pytest.mark.parametrize(
    ("values", "tp_size"),
    [(QWEN3, 2), (QWEN3, 4), (UNTIED, 2), (GROUPED, 2), (LLAMA, 4), (QWEN2, 2), (UNEVEN, 2), (UNEVEN_UNTIED, 4)],
    ids=["qwen3-2", "qwen3-4", "untied-2", "grouped-2", "llama-4", "qwen2-2", "uneven-2", "uneven-4"],
)
def test_loss_and_every_gradient_equal_the_plain_ones(values, tp_size):
    loss, gradients = plain_run(values)
    assert set(gradients) == {name for name, _ in make_backbone(values).named_parameters()}
    for found_loss, found in run_ranks(tp_size, parallel_run, values, ()):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, gradients)


@pytest.mark.parametrize("frozen", ["connector", "backbone"])
def test_frozen_parts_get_no_gradient_and_pass_it_on(frozen):
    loss, gradients = plain_run(QWEN3, (frozen,))
    assert not any(name.startswith("connector.") == (frozen == "connector") for name in gradients)
    for found_loss, found in run_ranks(2, parallel_run, QWEN3, (frozen,)):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, gradients)


def staged_run(values):
    """Three stages in one process, as a pipeline would chain them; also how parameters lie."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = make_backbone(values)
    stages = [take_stage(whole, range(number, number + 1)) for number in range(3)]
    for stage in stages:
        parallelize(stage, mesh)
    batch, hidden = make_batch(), None
    for stage in stages:
        hidden = stage(**batch, hidden=hidden)
    hidden.backward()
    placements = {name: parameter.placements for stage in stages for name, parameter in stage.named_parameters()}
    return hidden.item(), full_gradients(*stages), placements


@pytest.mark.parametrize("values", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_stages_without_embedding_or_head(values):
    loss, gradients = plain_run(values)
    for found_loss, found, _ in run_ranks(2, staged_run, values):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        if values is QWEN3:  # first and last stage have a copy each
            embedding = "language_model.model.embed_tokens.weight"
            found[embedding] = found[embedding] + found.pop("language_model.lm_head.weight")
        assert_close(found, gradients)


def test_how_parameters_lie():
    _, _, placements = run_ranks(2, staged_run, UNTIED)[0]
    layer = "language_model.model.layers.1."
    assert placements[layer + "self_attn.q_proj.weight"] == (Shard(0),)
    assert placements[layer + "self_attn.o_proj.weight"] == (Shard(1),)
    assert placements[layer + "self_attn.q_norm.weight"] == (Replicate(),)
    assert placements["language_model.model.norm.weight"] == (Replicate(),)
    assert placements["language_model.model.embed_tokens.weight"] == (Shard(0),)
    assert placements["language_model.lm_head.weight"] == (Shard(0),)
    assert placements["connector.linear_1.bias"] == (Shard(0),)
    assert placements["connector.linear_2.bias"] == (Replicate(),)


def sharded_run(values):
    """Two microbatches on each of two replicas of two ranks, with FSDP2 on top; gradients are summed at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    backbone = make_backbone(values)
    parallelize(backbone, mesh["tp"])
    for layer in backbone.decoder_layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(backbone, mesh=mesh["dp"], reshard_after_forward=False)
    weight = backbone.language_model.get_input_embeddings().weight
    assert weight.device_mesh.ndim == 2
    is_tied = weight is backbone.language_model.get_output_embeddings().weight
    for index in range(2):
        backbone.set_requires_gradient_sync(index == 1)
        backbone.set_is_last_backward(index == 1)
        loss = backbone(**make_batch(2 * index + mesh["dp"].get_local_rank(), vocab_size=values["vocab_size"]))
        (2 * loss).backward()  # FSDP takes the mean over two replicas
    norm = nn.utils.clip_grad_norm_(backbone.parameters(), 1e9)
    return full_gradients(backbone), float(norm.full_tensor()), is_tied


@pytest.mark.parametrize("values", [QWEN3, UNEVEN, UNEVEN_UNTIED], ids=["tied", "uneven", "uneven-untied"])
def test_fsdp_on_top_gives_the_same_gradients(values):
    _, gradients = plain_run(values, batches=range(4))
    expected_norm = float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
    for found, norm, is_tied in run_ranks(4, sharded_run, values):
        assert is_tied == values["tie_word_embeddings"]
        assert_close(found, gradients)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


def frugal_run(strategies):
    """Gradients under memory strategies, and collectives in forward and backward."""
    backbone = make_backbone(QWEN3)
    parallelize(backbone, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    results = []
    for strategy in strategies:
        backbone.zero_grad()
        with Operators() as operators:
            backbone(**make_batch(), memory=strategy).backward()
        results.append((full_gradients(backbone), operators.counts["_c10d_functional::all_reduce"]))
    return results


def test_memory_strategies_on_several_ranks():
    _, gradients = plain_run(QWEN3)
    strategies = [MemoryStrategy.KEEP, MemoryStrategy.SELECTIVE, MemoryStrategy.RECOMPUTE]
    for results in run_ranks(2, frugal_run, strategies):
        for found, _ in results:
            assert_close(found, gradients)
        kept, selective, recomputed = (num_sums for _, num_sums in results)
        # Forward: two regions a layer, embedding, connector. Backward: two a layer; the features need no gradient.
        assert kept == 3 * 2 + 2 + 3 * 2
        assert selective == kept, "sums are kept, not repeated"
        assert recomputed > kept


def refusal(values):
    """What is said about a model that cannot be split."""
    backbone = make_backbone(values)
    try:
        parallelize(backbone, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**QWEN3, "num_key_value_heads": 1}, "num_key_value_heads (1)"),
        ({**QWEN3, "model_type": "phi3"}, "colwise_gather_output"),
        ({**QWEN3, "model_type": "gpt2"}, "is missing"),
    ],
    ids=["heads", "style", "no-plan"],
)
def test_what_cannot_be_split_is_refused(values, message):
    for said in run_ranks(2, refusal, values):
        assert said is not None and message in said and "backbone.tensor_parallel_size" in said, said


def memory_run():
    """Bytes that the shards hold on to, and bytes of the shards."""
    backbone = make_backbone(QWEN3)
    parallelize(backbone, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    assert all(isinstance(parameter, DTensor) for parameter in backbone.parameters())
    local = [parameter.to_local() for parameter in backbone.parameters()]
    return [(shard.untyped_storage().nbytes(), shard.numel() * shard.element_size()) for shard in local]


def test_whole_weights_are_let_go():
    for sizes in run_ranks(2, memory_run):
        assert all(held == needed for held, needed in sizes)
