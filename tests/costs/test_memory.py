"""Predicted memory against what torch keeps in real models, and how it follows parallel degrees."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowtrain.costs.activations import chunk_activation_nbytes, layer_activation_nbytes
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.memory import StepMemory, encoder_peak_nbytes, predict_step_memory
from flowtrain.costs.model_spec import ConnectorSpec
from flowtrain.costs.training_setup import LOSS_CHUNK_TOKENS, Chunk, MicrobatchSize, TrainingSetup
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.stage import take_stage
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from tests.allocator.worlds import VISION

LENGTHS, NUM_ROWS, FEATURE_DIM, VOCAB, NUM_LAYERS = (70, 58), 9, 48, 96, 5
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
SPEC = from_hf_text_config(transformers.Qwen3Config(**SHAPE).to_dict())
CONNECTOR = ConnectorSpec(FEATURE_DIM, SPEC.hidden_size, SPEC.hidden_size)
MICROBATCH = MicrobatchSize(sum(LENGTHS), sum(LENGTHS) // 2, NUM_ROWS)
STRATEGIES = {
    "none": MemoryStrategy.KEEP,
    "full": MemoryStrategy.RECOMPUTE,
    "selective": MemoryStrategy.SELECTIVE,
    "every_n": MemoryStrategy(MemoryKind.RECOMPUTE, 2),
}


class LiveStorages(TorchDispatchMode):
    """Records the tensors that operators produce inside, and the bytes of them that are alive.

    Hooks on saved tensors are not enough: they do not see what checkpointed layers keep.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def nbytes(self, module: torch.nn.Module) -> int:
        """Bytes alive now that do not belong to the module."""
        gc.collect()
        own = {local_shard(tensor).untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        return sum(nbytes for pointer, (ref, nbytes) in self._made.items() if not ref.expired() and pointer not in own)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_backbone(family: str, dtype: torch.dtype) -> Backbone:
    config = getattr(transformers, f"{family}Config")(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation_name("sdpa"))
    return Backbone(Connector(FEATURE_DIM, SPEC.hidden_size), model).to(dtype).train()


def forward(module: Backbone, memory: MemoryStrategy, hidden: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    num_tokens = MICROBATCH.num_tokens
    targets = torch.full((num_tokens,), -100)
    targets[: MICROBATCH.num_target_tokens] = 3
    return module(
        input_ids=torch.ones(num_tokens, dtype=torch.long),
        targets=targets,
        weights=torch.ones(num_tokens),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]),
        cu_seqlens=torch.tensor([0, LENGTHS[0], num_tokens], dtype=torch.int32),
        max_seqlen=max(LENGTHS),
        features=torch.randn(NUM_ROWS, FEATURE_DIM, dtype=dtype),
        feature_index=torch.arange(NUM_ROWS),
        hidden=hidden,
        memory=memory,
    )


def kept_nbytes(module: Backbone, memory: MemoryStrategy, dtype: torch.dtype) -> int:
    """Bytes that stay alive after a forward, with the batch."""
    live = LiveStorages()
    with live:
        hidden = None
        if not module.is_first_stage:
            hidden = torch.randn(1, MICROBATCH.num_tokens, SPEC.hidden_size, dtype=dtype).requires_grad_()
        result = forward(module, memory, hidden, dtype)
    nbytes = live.nbytes(module)
    del result
    return nbytes


def loss_kept_nbytes(dtype: torch.dtype) -> int:
    """Gradients that the fused loss holds for the backward: of the rows with a target, and of the head."""
    return dtype.itemsize * (MICROBATCH.num_target_tokens * SPEC.hidden_size + VOCAB * SPEC.hidden_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", STRATEGIES)
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_activations_are_what_torch_keeps(family: str, checkpointing: str, dtype: torch.dtype) -> None:
    backbone = make_backbone(family, dtype)
    spec = from_hf_text_config(backbone.language_model.config.to_dict())
    setup = setup_of(dtype, activation_checkpointing=checkpointing)
    kept = kept_nbytes(backbone, STRATEGIES[checkpointing], dtype) - loss_kept_nbytes(dtype)
    predicted = chunk_activation_nbytes(spec, CONNECTOR, Chunk(NUM_LAYERS), setup, MICROBATCH)
    assert predicted == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [range(0, 2), range(1, 4), range(4, 5)])
def test_pipeline_stages_keep_what_they_pass_on(layers: range, dtype: torch.dtype) -> None:
    is_first, is_last = layers.start == 0, layers.stop == NUM_LAYERS
    stage = take_stage(make_backbone("Qwen3", dtype), layers, is_first=is_first, is_last=is_last)
    kept = kept_nbytes(stage, MemoryStrategy.KEEP, dtype)
    chunk = Chunk(len(layers), is_first=is_first, is_last=is_last)
    if chunk.is_last:
        kept -= loss_kept_nbytes(dtype)
    predicted = chunk_activation_nbytes(SPEC, CONNECTOR, chunk, setup_of(dtype), MICROBATCH)
    assert predicted == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_layer_is_what_autograd_saves_for_it(family: str) -> None:
    """By torch's hooks: storages saved by four layers minus those saved by three."""
    saved = []
    for layers in (range(0, 3), range(0, 4)):
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            return tensor

        stage = take_stage(make_backbone(family, torch.bfloat16), layers, is_first=True, is_last=False)
        own = {tensor.untyped_storage()._cdata for tensor in (*stage.parameters(), *stage.buffers())}
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(stage, MemoryStrategy.KEEP, None, torch.bfloat16)
        saved.append(sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own))
        del result
    spec = from_hf_text_config(make_backbone(family, torch.bfloat16).language_model.config.to_dict())
    predicted = layer_activation_nbytes(spec, setup_of(torch.bfloat16), MICROBATCH.num_tokens)
    assert predicted == pytest.approx(saved[1] - saved[0], rel=0.02)


def test_parameters_are_those_of_the_model() -> None:
    backbone = make_backbone("Qwen3", torch.float32)
    memory = predict(TrainingSetup(accumulates=False))
    assert memory.parameters == 4 * sum(parameter.numel() for parameter in backbone.parameters())
    assert (memory.gradients, memory.optimizer_state) == (memory.parameters, 2 * memory.parameters)
    assert predict(TrainingSetup(optimizer="sgd")).optimizer_state == 0
    stages = [
        take_stage(backbone, layers, is_first=layers.start == 0, is_last=layers.stop == 5)
        for layers in (range(0, 2), range(2, 4), range(4, 5))
    ]
    chunks = [Chunk(2, is_last=False), Chunk(2, False, False), Chunk(1, is_first=False)]
    for stage, chunk in zip(stages, chunks, strict=True):
        expected = 4 * sum(parameter.numel() for parameter in stage.parameters())
        assert predict(TrainingSetup(), (chunk,)).parameters == expected


def test_degrees_share_memory_out() -> None:
    one = predict(TrainingSetup(accumulates=False))
    dp = predict(TrainingSetup(dp=2, accumulates=False))
    tp = predict(TrainingSetup(tp=2, accumulates=False))
    assert dp.parameters == -(-one.parameters // 2) and dp.optimizer_state == one.optimizer_state // 2
    assert dp.activations == one.activations, "each replica has its own microbatches"
    assert 0.5 * one.parameters < tp.parameters < 0.51 * one.parameters, "but for the norms"
    assert 0.5 * one.activations < tp.activations < one.activations, "the norms run whole on both ranks"
    assert tp.loss < one.loss and dp.loss == one.loss


def test_what_is_held_at_once() -> None:
    assert predict(TrainingSetup()).accumulated == predict(TrainingSetup(dp=4)).accumulated > 0
    assert predict(TrainingSetup(accumulates=False)).accumulated == 0
    full, kept = (predict(TrainingSetup(sharding=name, dp=2)).gathered for name in ("full", "gradients"))  # type: ignore[arg-type]
    assert kept > full
    assert predict(TrainingSetup()).gathered == kept, "a single replica has nobody to share with"
    flights = [predict(TrainingSetup(), (Chunk(2, is_last=False, in_flight=count),)) for count in (1, 3)]
    assert flights[1].activations == 3 * flights[0].activations
    pair = Chunk(2, is_last=False, in_flight=2), Chunk(1, is_first=False)
    whole = predict(TrainingSetup(), pair).activations
    assert whole == sum(predict(TrainingSetup(), (chunk,)).activations for chunk in pair)


def test_recomputing_more_keeps_less() -> None:
    setups = [TrainingSetup(activation_checkpointing=name) for name in ("none", "every_n", "selective", "full")]  # type: ignore[arg-type]
    none, every, selective, full = (predict(setup) for setup in setups)
    assert none.activations > every.activations > full.activations and none.activations > selective.activations
    assert full.working == every.working == selective.working > none.working, "a recomputed layer exists for a while"
    seldom = predict(replace(setups[1], checkpoint_every=4))
    assert every.activations < seldom.activations < none.activations


def test_the_loss_never_has_all_logits() -> None:
    many = replace(MICROBATCH, num_tokens=8192, num_target_tokens=8192)
    spec = replace(SPEC, vocab_size=150_000)
    loss = predict_step_memory(spec, CONNECTOR, (Chunk(NUM_LAYERS),), TrainingSetup(), many).loss
    chunk = 6 * LOSS_CHUNK_TOKENS * spec.vocab_size
    assert chunk < loss < 1.1 * chunk, "the logits of a chunk, in bfloat16 and float32"
    assert loss < 0.3 * 6 * 8192 * spec.vocab_size


def test_the_peak_is_where_most_is_held() -> None:
    memory = StepMemory(
        parameters=10, gradients=10, optimizer_state=20, accumulated=0, gathered=3, activations=40, working=5, loss=7,
        reduced=4,
    )  # fmt: skip
    assert memory.peak == 10 + 20 + 3 + 40 + 7
    assert replace(memory, activations=2).peak == 10 + 20 + 10 + 4, "the last gradients are reduced"
    tables = replace(memory, activations=2, tables=12, in_flight=1)
    assert tables.peak == 10 + 20 + 3 + 1 + 12 and tables.moments == ("loss", "backward", "embedding", "reduction")
    assert replace(memory, accumulated=10).peak == 10 + 20 + 10 + 3 + 40 + 7


def test_an_encoders_memory_is_its_weights_and_one_batch() -> None:
    def peak(tp: int, patches: int) -> int:
        return encoder_peak_nbytes(VISION, tp, max_batch_patches=patches, dtype_nbytes=2)

    assert peak(1, 0) == 2 * VISION.num_parameters
    assert peak(1, 0) < peak(1, 1024) < peak(1, 2048) and peak(2, 1024) < peak(1, 1024)


def setup_of(dtype: torch.dtype, **changes: Any) -> TrainingSetup:
    return TrainingSetup(dtype=str(dtype).removeprefix("torch."), attention="sdpa", **changes)  # type: ignore[arg-type]


def predict(setup: TrainingSetup, chunks: tuple[Chunk, ...] = (Chunk(NUM_LAYERS),)) -> StepMemory:
    return predict_step_memory(SPEC, CONNECTOR, chunks, setup, MICROBATCH)
