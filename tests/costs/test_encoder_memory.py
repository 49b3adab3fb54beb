"""Predicted memory of a vision tower inside a rank against what torch keeps of real towers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from flowtrain.costs.encoder_memory import (
    EncoderShare,
    encoder_chunk_activation_nbytes,
    encoder_kept_nbytes,
    encoder_layer_activation_nbytes,
)
from flowtrain.costs.hf_config import from_hf_vision_config
from flowtrain.costs.memory import encoder_peak_nbytes, predict_step_memory
from flowtrain.costs.model_spec import VisionSpec
from flowtrain.costs.training_setup import Chunk, EncoderChunk, MicrobatchSize, TrainingSetup
from flowtrain.models.encoder_stage import EncoderStage
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.qwen3_vl_vision import Qwen3VisionShape, Qwen3VisionStage
from flowtrain.models.tower_plans import distribute_tower
from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class
from flowtrain.pipeline.actions import MemoryStrategy
from tests.costs.test_memory import CONNECTOR, MICROBATCH, SPEC, STRATEGIES, LiveStorages, setup_of
from tests.models.ranks import run_ranks

NUM_LAYERS, NUM_IMAGES, SIDE = 4, 3, 56
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "siglip": ("siglip_vision_model", {}),
    "clip": ("clip_vision_model", {}),
    "dinov2": ("dinov2", {}),
    "dinov2, gated": ("dinov2", {"use_swiglu_ffn": True}),
    "vit": ("vit", {}),
    "internvl": ("internvl_vision", {}),
    "internvl, normed": ("internvl_vision", {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}),
    "qwen3_vl": ("qwen3_vl_vision", {}),
    "qwen3_vl, no deepstack": ("qwen3_vl_vision", {"deepstack_visual_indexes": []}),
}
QWEN3_VL = {
    "hidden_size": SHAPE["hidden_size"],
    "intermediate_size": SHAPE["intermediate_size"],
    "depth": NUM_LAYERS,
    "num_heads": SHAPE["num_attention_heads"],
    "patch_size": SHAPE["patch_size"],
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]


def make_stage(name: str, dtype: torch.dtype) -> EncoderStage:
    model_type, extra = TOWERS[name]
    if model_type == "qwen3_vl_vision":
        config = transformers.AutoConfig.for_model(model_type, **QWEN3_VL | extra)
        return Qwen3VisionStage(tower_class(config)._from_config(config), trainable=True).to(dtype)
    config = transformers.AutoConfig.for_model(model_type, **SHAPE | extra)
    tower = tower_class(config)._from_config(config)
    drops_first = model_type != "siglip_vision_model"
    return VisionStage(tower, feature_layer=-2, drop_first=drops_first, trainable=True).to(dtype)


def spec_of(stage: EncoderStage) -> VisionSpec:
    """Of the computed layers, as the tower's family has it."""
    spec, shape = replace(from_hf_vision_config(stage.tower.config.to_dict()), num_layers=NUM_LAYERS), stage.shape
    return (
        replace(spec, patches_per_row=shape.unit, levels=shape.num_levels)
        if isinstance(shape, Qwen3VisionShape)
        else spec
    )


def kept_nbytes(
    stage: EncoderStage, dtype: torch.dtype, memory: MemoryStrategy = MemoryStrategy.KEEP, first_layer: int = 0
) -> int:
    """Bytes that stay alive after a forward, with what the stage got."""
    live, sizes = LiveStorages(), [(SIDE, SIDE)] * NUM_IMAGES
    with live:
        if stage.is_first:
            given: Any = [torch.randn(3, SIDE, SIDE, dtype=dtype) for _ in sizes]
        else:
            num_tokens = NUM_IMAGES * stage.shape.num_tokens(sizes[0])
            given = torch.randn(num_tokens, stage.shape.width_after(first_layer), dtype=dtype).requires_grad_()
        result = stage(given, sizes, memory)
        if stage.is_first:
            del given  # of the batch, not of the stage
    nbytes = live.nbytes(stage)
    del result
    return nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TOWERS)
def test_a_trained_tower_keeps_what_torch_keeps(name: str, dtype: torch.dtype) -> None:
    whole = make_stage(name, dtype)
    spec, num_tokens = spec_of(whole), NUM_IMAGES * whole.shape.num_tokens((SIDE, SIDE))
    size = MicrobatchSize(0, 0, NUM_IMAGES * whole.shape.num_rows((SIDE, SIDE)), num_tokens)
    for layers in (range(0, 4), range(0, 2), range(1, 3), range(2, 4)):
        chunk = EncoderChunk(len(layers), layers.start == 0, layers.stop == NUM_LAYERS, is_trained=True, sends=True)
        stage = whole.take(layers, is_first=chunk.is_first, is_last=chunk.is_last)
        predicted = encoder_chunk_activation_nbytes(spec, chunk, setup_of(dtype), size)
        kept = kept_nbytes(stage, dtype, first_layer=layers.start)
        assert predicted == pytest.approx(kept, rel=0.05), layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TOWERS)
def test_a_layer_is_what_one_more_layer_keeps(name: str, dtype: torch.dtype) -> None:
    whole = make_stage(name, dtype)
    spec = spec_of(whole)
    two, three = (kept_nbytes(whole.take(range(count), is_first=True, is_last=True), dtype) for count in (2, 3))
    num_tokens = NUM_IMAGES * whole.shape.num_tokens((SIDE, SIDE))
    predicted = encoder_layer_activation_nbytes(spec, setup_of(dtype), num_tokens)
    assert predicted == pytest.approx(three - two, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointing", STRATEGIES)
@pytest.mark.parametrize("name", ["siglip", "dinov2, gated", "qwen3_vl"])
def test_recomputed_layers_keep_what_torch_keeps(name: str, checkpointing: str, dtype: torch.dtype) -> None:
    stage = make_stage(name, dtype)
    spec = spec_of(stage)
    size = (SIDE, SIDE)
    microbatch = MicrobatchSize(
        0, 0, NUM_IMAGES * stage.shape.num_rows(size), NUM_IMAGES * stage.shape.num_tokens(size)
    )
    setup = setup_of(dtype, activation_checkpointing=checkpointing)
    chunk = EncoderChunk(NUM_LAYERS, is_trained=True, sends=True)
    predicted = encoder_chunk_activation_nbytes(spec, chunk, setup, microbatch)
    assert predicted == pytest.approx(kept_nbytes(stage, dtype, STRATEGIES[checkpointing]), rel=0.05)


@pytest.mark.parametrize("name", TOWERS)
def test_parameters_are_those_that_features_need(name: str) -> None:
    stage = make_stage(name, torch.float32)
    spec = spec_of(stage)
    expected = sum(parameter.numel() for parameter in stage.parameters())
    assert spec.num_computed_parameters == expected
    size = replace(MICROBATCH, num_tower_tokens=99)
    plain, frozen, trained = (
        predict_step_memory(SPEC, CONNECTOR, (Chunk(2),), TrainingSetup(), size, encoder)
        for encoder in (
            None,
            EncoderShare(spec, (EncoderChunk(NUM_LAYERS),)),
            EncoderShare(spec, (EncoderChunk(NUM_LAYERS, is_trained=True),)),
        )
    )
    assert (frozen.frozen, frozen.parameters) == (2 * expected, plain.parameters)
    assert (trained.frozen, trained.parameters) == (0, plain.parameters + 4 * expected)
    assert trained.optimizer_state == plain.optimizer_state + 8 * expected


@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
def test_a_trained_embedding_without_layers_is_counted(checkpointing: Any) -> None:
    spec = replace(spec_of(make_stage("clip", torch.float32)), num_layers=0)
    setup = TrainingSetup(activation_checkpointing=checkpointing)
    share = EncoderShare(spec, (EncoderChunk(0, is_trained=True),))
    plain, found = (
        predict_step_memory(SPEC, CONNECTOR, (Chunk(2),), setup, replace(MICROBATCH, num_tower_tokens=99), encoder)
        for encoder in (None, share)
    )
    assert found.parameters == plain.parameters + 4 * share.outer_parameters
    assert found.activations > plain.activations and found.host == plain.host


def test_tensor_parallel_ranks_share_heads_and_widths() -> None:
    spec = spec_of(make_stage("siglip", torch.float32))
    setups = TrainingSetup(), TrainingSetup(tp=2, sequence_parallel=False), TrainingSetup(tp=2)
    one, whole, split = (encoder_layer_activation_nbytes(spec, setup, 100) for setup in setups)
    assert 0.5 * one < split < whole < one, "the inputs of attention and MLP are whole"
    shares = [EncoderShare(spec, (EncoderChunk(1),)).layer_parameters(tp) for tp in (1, 2)]
    assert shares[0] == spec.layer_parameters and 0.5 * shares[0] < shares[1] < 0.6 * shares[0]


SPLIT = [(name, word) for name in ("siglip", "internvl", "qwen3_vl") for word in ("none", "full", "selective")]


def fewest_nbytes(stage: EncoderStage, memory: MemoryStrategy, first_layer: int = 0) -> int:
    """As ``kept_nbytes``, of three tries: a collective's thread may still hold its tensors when they are counted."""
    return min(kept_nbytes(stage, torch.float32, memory, first_layer) for _ in range(3))


def measured_on_a_rank(sequence_parallel: bool) -> list[tuple[int, int, int]]:
    """Of one of two tensor parallel ranks: parameters of a layer, what one more layer keeps, and a stage of two."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for name, word in SPLIT:
        whole = make_stage(name, torch.float32)
        distribute_tower(whole, mesh, sequence_parallel=sequence_parallel)
        two, three = (
            fewest_nbytes(whole.take(range(count), is_first=True, is_last=True), STRATEGIES[word]) for count in (2, 3)
        )
        held = sum(local_shard(parameter).numel() for parameter in whole.layers[0].parameters())
        middle = whole.take(range(1, 3), is_first=False, is_last=False)
        found.append((held, three - two, fewest_nbytes(middle, STRATEGIES[word], first_layer=1)))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_tensor_parallel_rank_holds_and_keeps_its_share_of_a_layer(sequence_parallel: bool) -> None:
    """A fused matrix is whole on every rank, which computes with a copy of its own rows."""
    chunk = EncoderChunk(2, is_first=False, is_last=False, is_trained=True, sends=True)
    for found in run_ranks(2, measured_on_a_rank, sequence_parallel):
        for (name, word), (held, kept, of_stage) in zip(SPLIT, found, strict=True):
            stage = make_stage(name, torch.float32)
            spec, num_tokens = spec_of(stage), NUM_IMAGES * stage.shape.num_tokens((SIDE, SIDE))
            assert EncoderShare(spec, (EncoderChunk(1),)).layer_parameters(2) == pytest.approx(held, rel=0.02), name
            setup = setup_of(torch.float32, tp=2, sequence_parallel=sequence_parallel, activation_checkpointing=word)
            predicted = encoder_kept_nbytes(spec, setup, num_tokens, word)
            assert predicted == pytest.approx(kept, rel=0.02), (name, word)
            size = MicrobatchSize(0, 0, NUM_IMAGES * stage.shape.num_rows((SIDE, SIDE)), num_tokens)
            # The rule counts the received levels of the last stage; here is the first one.
            later = max(spec.levels - 2, 0) * num_tokens * spec.hidden_size * 4
            predicted = encoder_chunk_activation_nbytes(spec, chunk, setup, size) - later
            assert predicted == pytest.approx(of_stage, rel=0.02), (name, word)


class PeakStorages(LiveStorages):
    """Records the most bytes that were alive at once, too."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, sum(nbytes for ref, nbytes in self._made.values() if not ref.expired()))
        return out


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_encoder_holds_the_levels_of_deepstack_until_its_end(dtype: torch.dtype) -> None:
    peaks, predicted = [], []
    for name in ("qwen3_vl, no deepstack", "qwen3_vl"):
        stage, live = make_stage(name, dtype), PeakStorages()
        images, sizes = (
            [torch.randn(3, SIDE, SIDE, dtype=dtype) for _ in range(NUM_IMAGES)],
            [(SIDE, SIDE)] * NUM_IMAGES,
        )
        stage(images, sizes)  # keeps the places of patches
        with live:
            stage(images, sizes)
        peaks.append(live.peak)
        patches = NUM_IMAGES * stage.shape.num_patches((SIDE, SIDE))
        nbytes = {"max_batch_patches": patches, "dtype_nbytes": dtype.itemsize}
        predicted.append(encoder_peak_nbytes(spec_of(stage), 1, **nbytes))
    assert predicted[1] - predicted[0] == peaks[1] - peaks[0] > 0


def test_joined_levels_are_the_peak_of_an_encoder_that_is_split() -> None:
    """A rank has less of a layer, and all levels."""
    spec = replace(spec_of(make_stage("qwen3_vl", torch.float32)), num_layers=0, outside_parameters=0, levels=4)
    assert encoder_peak_nbytes(spec, 64, max_batch_patches=10, dtype_nbytes=2) == 2 * (2 * 4 * spec.hidden_size * 10)
