"""Predicted memory of a vision tower inside a rank against what torch keeps of real towers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from flowtrain.costs.encoder_memory import (
    EncoderShare,
    encoder_chunk_activation_nbytes,
    encoder_layer_activation_nbytes,
)
from flowtrain.costs.hf_config import from_hf_vision_config
from flowtrain.costs.memory import predict_step_memory
from flowtrain.costs.training_setup import Chunk, EncoderChunk, MicrobatchSize, TrainingSetup
from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class
from flowtrain.pipeline.actions import MemoryStrategy
from tests.costs.test_memory import CONNECTOR, MICROBATCH, SPEC, STRATEGIES, LiveStorages, setup_of

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
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_stage(name: str, dtype: torch.dtype) -> VisionStage:
    model_type, extra = TOWERS[name]
    config = transformers.AutoConfig.for_model(model_type, **SHAPE | extra)
    tower = tower_class(config)._from_config(config)
    drops_first = model_type != "siglip_vision_model"
    return VisionStage(tower, feature_layer=-2, drop_first=drops_first, trainable=True).to(dtype)


def kept_nbytes(stage: VisionStage, dtype: torch.dtype, memory: MemoryStrategy = MemoryStrategy.KEEP) -> int:
    """Bytes that stay alive after a forward, with what the stage got."""
    live, sizes = LiveStorages(), [(SIDE, SIDE)] * NUM_IMAGES
    with live:
        if stage.is_first:
            given: Any = [torch.randn(3, SIDE, SIDE, dtype=dtype) for _ in sizes]
        else:
            num_tokens = NUM_IMAGES * stage.shape.num_tokens(sizes[0])
            given = torch.randn(num_tokens, stage.shape.width, dtype=dtype).requires_grad_()
        result = stage(given, sizes, memory)
        if stage.is_first:
            del given  # of the batch, not of the stage
    nbytes = live.nbytes(stage)
    del result
    return nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOWERS)
def test_a_trained_tower_keeps_what_torch_keeps(name: str, dtype: torch.dtype) -> None:
    whole = make_stage(name, dtype)
    spec = replace(from_hf_vision_config(whole.shape.config.to_dict()), num_layers=NUM_LAYERS)
    num_tokens = NUM_IMAGES * whole.shape.num_tokens((SIDE, SIDE))
    size = MicrobatchSize(0, 0, NUM_IMAGES * whole.shape.num_rows((SIDE, SIDE)), num_tokens)
    for layers in (range(0, 4), range(0, 2), range(1, 3), range(2, 4)):
        chunk = EncoderChunk(len(layers), layers.start == 0, layers.stop == NUM_LAYERS, is_trained=True, sends=True)
        stage = whole.take(layers, is_first=chunk.is_first, is_last=chunk.is_last)
        predicted = encoder_chunk_activation_nbytes(spec, chunk, setup_of(dtype), size)
        assert predicted == pytest.approx(kept_nbytes(stage, dtype), rel=0.05), layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOWERS)
def test_a_layer_is_what_one_more_layer_keeps(name: str, dtype: torch.dtype) -> None:
    whole = make_stage(name, dtype)
    spec = from_hf_vision_config(whole.shape.config.to_dict())
    two, three = (kept_nbytes(whole.take(range(count), is_first=True, is_last=True), dtype) for count in (2, 3))
    num_tokens = NUM_IMAGES * whole.shape.num_tokens((SIDE, SIDE))
    predicted = encoder_layer_activation_nbytes(spec, setup_of(dtype), num_tokens)
    assert predicted == pytest.approx(three - two, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", STRATEGIES)
@pytest.mark.parametrize("name", ["siglip", "dinov2, gated"])
def test_recomputed_layers_keep_what_torch_keeps(name: str, checkpointing: str, dtype: torch.dtype) -> None:
    stage = make_stage(name, dtype)
    spec = from_hf_vision_config(stage.shape.config.to_dict())
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
    spec = replace(from_hf_vision_config(stage.shape.config.to_dict()), num_layers=NUM_LAYERS)
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
    spec = replace(from_hf_vision_config(make_stage("clip", torch.float32).shape.config.to_dict()), num_layers=0)
    setup = TrainingSetup(activation_checkpointing=checkpointing)
    share = EncoderShare(spec, (EncoderChunk(0, is_trained=True),))
    plain, found = (
        predict_step_memory(SPEC, CONNECTOR, (Chunk(2),), setup, replace(MICROBATCH, num_tower_tokens=99), encoder)
        for encoder in (None, share)
    )
    assert found.parameters == plain.parameters + 4 * share.outer_parameters
    assert found.activations > plain.activations and found.host == plain.host


def test_tensor_parallel_ranks_share_heads_and_widths() -> None:
    spec = from_hf_vision_config(make_stage("siglip", torch.float32).shape.config.to_dict())
    one, two = (encoder_layer_activation_nbytes(spec, TrainingSetup(tp=tp), 100) for tp in (1, 2))
    assert 0.5 * one < two < one, "norms and residuals are whole"
    shares = [EncoderShare(spec, (EncoderChunk(1),)).layer_parameters(tp) for tp in (1, 2)]
    assert shares[0] == spec.layer_parameters and 0.5 * shares[0] < shares[1] < 0.6 * shares[0]
