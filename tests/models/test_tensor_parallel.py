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
from flowtrain.models.tensor_parallel import checked_styles, parallelize
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from tests.models.operators import Operators
from tests.models.ranks import QWEN3, assert_close, full_gradients, make_backbone, make_batch, run_ranks

pytestmark = pytest.mark.processes

UNTIED = {**QWEN3, "tie_word_embeddings": False}
LLAMA = {**UNTIED, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
QWEN2 = {**UNTIED, "model_type": "qwen2", "num_hidden_layers": 2}
STARCODER2 = {**UNTIED, "model_type": "starcoder2", "num_hidden_layers": 2}  # norms and linear layers with biases
GROUPED = {**QWEN3, "num_key_value_heads": 2}
UNEVEN = {**QWEN3, "vocab_size": 35}
UNEVEN_UNTIED = {**UNTIED, "vocab_size": 35}


LENGTHS = ((7, 1, 12, 4), (5, 8), (3,), (1,))
"""Of packed sequences: divided by the ranks, odd, less than four ranks have, and a single token."""


def parallelized(values, sequence_parallel=True, **options):
    """A backbone on all ranks."""
    backbone = make_backbone(values, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize(backbone, mesh, sequence_parallel=sequence_parallel)
    return backbone


def losses_and_gradients(backbone, values, lengths):
    """Of one microbatch for each of ``lengths``."""
    results = []
    for number, each in enumerate(lengths):
        backbone.zero_grad()
        loss = backbone(**make_batch(number, each, vocab_size=values["vocab_size"]))
        loss.backward()
        results.append((loss.item(), full_gradients(backbone)))
    return results


def plain_run(values, frozen=(), batches=(0,)):
    """Loss and gradients of the plain backbone, summed over batches."""
    backbone = make_backbone(values, frozen=frozen)
    loss = torch.stack([backbone(**make_batch(seed, vocab_size=values["vocab_size"])) for seed in batches]).sum()
    loss.backward()
    return loss.item(), full_gradients(backbone)


def parallel_run(values, frozen, lengths):
    """Results of one rank of a tensor parallel group: of the first without, and of all with sequence parallelism."""
    whole = losses_and_gradients(parallelized(values, False, frozen=frozen), values, lengths[:1])
    return whole + losses_and_gradients(parallelized(values, frozen=frozen), values, lengths)


@pytest.mark.parametrize(
    ("values", "tp_size"),
    [
        *((QWEN3, 2), (QWEN3, 4), (UNTIED, 2), (GROUPED, 2), (LLAMA, 4), (QWEN2, 2), (STARCODER2, 4)),
        *((UNEVEN, 2), (UNEVEN_UNTIED, 4)),
    ],
    ids=["qwen3-2", "qwen3-4", "untied-2", "grouped-2", "llama-4", "qwen2-2", "starcoder2-4", "uneven-2", "uneven-4"],
)
def test_loss_and_every_gradient_equal_the_plain_ones(values, tp_size):
    expected = losses_and_gradients(make_backbone(values), values, LENGTHS)
    names = {name for name, _ in make_backbone(values).named_parameters()}
    assert all(loss > 0 and set(gradients) == names for loss, gradients in expected)
    for results in run_ranks(tp_size, parallel_run, values, (), LENGTHS):
        for (found_loss, found), (loss, gradients) in zip(results, [expected[0], *expected], strict=True):
            assert found_loss == pytest.approx(loss, rel=1e-6)
            assert_close(found, gradients)


@pytest.mark.parametrize("frozen", ["connector", "backbone"])
def test_frozen_parts_get_no_gradient_and_pass_it_on(frozen):
    loss, gradients = plain_run(QWEN3, (frozen,))
    assert not any(name.startswith("connector.") == (frozen == "connector") for name in gradients)
    for results in run_ranks(2, parallel_run, QWEN3, (frozen,), LENGTHS[:1]):
        for found_loss, found in results:
            assert found_loss == pytest.approx(loss, rel=1e-6)
            assert_close(found, gradients)


def staged_run(values):
    """Three stages in one process, as a pipeline would chain them; also how parameters lie, and what stages pass on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = make_backbone(values)
    stages = [take_stage(whole, range(n, n + 1), is_first=n == 0, is_last=n == 2) for n in range(3)]
    for stage in stages:
        parallelize(stage, mesh)
    batch, hidden, shapes = make_batch(), None, []
    for stage in stages:
        hidden = stage(**batch, hidden=hidden)
        shapes.append(tuple(hidden.shape))
        assert stage.is_last_stage or hidden.shape[1] == stage.hidden_tokens(len(batch["input_ids"]))
    hidden.backward()
    placements = {name: parameter.placements for stage in stages for name, parameter in stage.named_parameters()}
    return hidden.item(), full_gradients(*stages), placements, shapes


@pytest.mark.parametrize("values", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_stages_without_embedding_or_head(values):
    loss, gradients = plain_run(values)
    for found_loss, found, _, shapes in run_ranks(2, staged_run, values):
        assert shapes == [(1, 12, 16), (1, 12, 16), ()]
        assert found_loss == pytest.approx(loss, rel=1e-6)
        if values is QWEN3:  # first and last stage have a copy each
            embedding = "language_model.model.embed_tokens.weight"
            found[embedding] = found[embedding] + found.pop("language_model.lm_head.weight")
        assert_close(found, gradients)


def test_how_parameters_lie():
    _, _, placements, _ = run_ranks(2, staged_run, UNTIED)[0]
    layer = "language_model.model.layers.1."
    assert placements[layer + "self_attn.q_proj.weight"] == (Shard(0),)
    assert placements[layer + "self_attn.o_proj.weight"] == (Shard(1),)
    assert placements[layer + "self_attn.q_norm.weight"] == (Replicate(),)
    assert placements["language_model.model.norm.weight"] == (Replicate(),)
    assert placements["language_model.model.embed_tokens.weight"] == (Shard(0),)
    assert placements["language_model.lm_head.weight"] == (Shard(0),)
    assert placements["connector.linear_1.bias"] == (Shard(0),)
    assert placements["connector.linear_2.bias"] == (Replicate(),)


def sharded_run(values, sequence_parallel):
    """Two microbatches on each of two replicas of two ranks, with FSDP2 on top; gradients are summed at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    backbone = make_backbone(values)
    parallelize(backbone, mesh["tp"], sequence_parallel=sequence_parallel)
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


@pytest.mark.parametrize(
    ("values", "sequence_parallel"),
    [(QWEN3, False), (QWEN3, True), (UNEVEN, True), (UNEVEN_UNTIED, True)],
    ids=["tied-whole", "tied", "uneven", "uneven-untied"],
)
def test_fsdp_on_top_gives_the_same_gradients(values, sequence_parallel):
    _, gradients = plain_run(values, batches=range(4))
    expected_norm = float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
    for found, norm, is_tied in run_ranks(4, sharded_run, values, sequence_parallel):
        assert is_tied == values["tie_word_embeddings"]
        assert_close(found, gradients)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


REDUCE, SCATTER = (f"_c10d_functional::{name}" for name in ("all_reduce", "reduce_scatter_tensor"))
GATHER, UNSAFE_GATHER = "c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"


def frugal_run(strategies, sequence_parallel):
    """Gradients under memory strategies, and collectives in forward and backward."""
    backbone, results = parallelized(QWEN3, sequence_parallel), []
    for strategy in strategies:
        backbone.zero_grad()
        with Operators() as operators:
            backbone(**make_batch(), memory=strategy).backward()
        counts = [operators.counts[name] for name in (REDUCE, GATHER, SCATTER)]
        assert not operators.counts[UNSAFE_GATHER], "two threads of gloo free its name twice"
        results.append((full_gradients(backbone), counts))
    return results


@pytest.mark.parametrize(
    ("sequence_parallel", "collectives"),
    [
        # Forward: two regions a layer, embedding, connector. Backward: two a layer; the features need no gradient.
        (False, {"keep": [14, 0, 0], "offload": [14, 0, 0], "selective": [14, 0, 0], "recompute": [17, 0, 0]}),
        # A region is entered and left by one each, forward and backward. The tokens are split once and joined once.
        # Selective gathers twice. In recomputing, a layer does without its last collective, whose result nobody needs.
        (True, {"keep": [2, 14, 12], "offload": [2, 14, 12], "selective": [2, 20, 12], "recompute": [2, 20, 15]}),
    ],
    ids=["whole", "split"],
)
def test_memory_strategies_on_several_ranks(sequence_parallel, collectives):
    _, gradients = plain_run(QWEN3)
    strategies = [MemoryStrategy(MemoryKind(kind)) for kind in collectives]
    for results in run_ranks(2, frugal_run, strategies, sequence_parallel):
        for found, _ in results:
            assert_close(found, gradients)
        assert dict(zip(collectives, (counts for _, counts in results), strict=True)) == collectives


def refusal(values):
    """What is said about a model that cannot be split."""
    try:
        parallelized(values)
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


def test_a_region_of_unknown_inputs_is_split_only_without_sequence_parallelism():
    backbone = make_backbone(QWEN3)
    layers = ("gate_proj", "up_proj", "down_proj")
    backbone.language_model.base_model.config.base_model_tp_plan = {
        f"layers.*.mlp.{name}": "colwise" for name in layers
    }
    checked_styles(backbone, 2, sequence_parallel=False)
    with pytest.raises(
        ConfigError, match=r"backbone.sequence_parallel: .*down_proj, gate_proj, up_proj of layers.0.mlp"
    ):
        checked_styles(backbone, 2)


def memory_run():
    """Bytes that the shards hold on to, and bytes of the shards."""
    backbone = parallelized(QWEN3)
    assert all(isinstance(parameter, DTensor) for parameter in backbone.parameters())
    local = [parameter.to_local() for parameter in backbone.parameters()]
    return [(shard.untyped_storage().nbytes(), shard.numel() * shard.element_size()) for shard in local]


def test_whole_weights_are_let_go():
    for sizes in run_ranks(2, memory_run):
        assert all(held == needed for held, needed in sizes)
