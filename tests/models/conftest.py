"""Tiny models, tokenizers and microbatches for the tests of ``flowtrain/models``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowtrain.config.run import RunConfig
from flowtrain.data.images import tiles_of
from flowtrain.models.families.base import Family
from tests.processors import leave_out_videos

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }} {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = {**SIGLIP, "model_type": "clip_vision_model"}
DINOV2 = {
    "model_type": "dinov2",
    "hidden_size": 32,
    "mlp_ratio": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
REGISTERS = {**DINOV2, "model_type": "dinov2_with_registers", "num_register_tokens": 3}
UNEVEN = {**SIGLIP, "image_size": 34}  # as SigLIP's 384 over 14: the last pixels belong to no patch
VIT = {**SIGLIP, "model_type": "vit"}
TOWER_CONFIGS = {"siglip": SIGLIP, "clip": CLIP, "dinov2": DINOV2, "registers": REGISTERS, "vit": VIT, "uneven": UNEVEN}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
LANGUAGE_CONFIGS = {"qwen3": QWEN3, "llama": LLAMA}


@dataclass(frozen=True)
class Sample:
    """Token ids with expanded images, labels (-100 = none), images, and the weight of each of its target tokens."""

    input_ids: list[int]
    labels: list[int]
    images: list[Image.Image]
    weight: float = 1.0


MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``leave_out_videos``."""
    leave_out_videos(monkeypatch)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word-level tokenizer of 40 tokens without an image token, with a chat template."""
    words = ["<unk>", "<pad>", "<s>", "</s>", "user", "assistant", "?", "!", *(f"w{i}" for i in range(32))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_config(tokenizer_path: Path) -> MakeConfig:
    """Build a RunConfig of tiny modules; keyword arguments replace whole sections."""

    def make(**sections: Any) -> RunConfig:
        model = {"tokenizer": str(tokenizer_path), **sections.pop("model", {})}
        defaults = {
            "name": "test",
            "seed": 7,
            "encoders": {"vision": {"config": SIGLIP, "feature_layer": -1}},
            "backbone": {"config": QWEN3},
            "data": {"sources": [{"path": "unused.parquet"}]},
        }
        return RunConfig.model_validate({**defaults, "model": model, **sections})

    return make


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_sample(family: Family, image_sizes: Sequence[tuple[int, int]], num_words: int, weight: float = 1.0) -> Sample:
    """A sample with images of these sizes (width, height) amid words; the second half of the words carries loss."""
    rng = np.random.default_rng([len(image_sizes), num_words])
    words = rng.integers(8, 40, num_words).tolist()
    images = [noise_image(width, height, seed) for seed, (width, height) in enumerate(image_sizes)]
    input_ids, labels = words[: num_words // 2], [-100] * (num_words // 2)
    for image in images:
        num_tokens = family.image_layout("vision", *image.size).num_tokens
        input_ids = [*input_ids, 3, *[family.image_token_id] * num_tokens]
        labels = [*labels, -100, *[-100] * num_tokens]
    return Sample(input_ids + words[num_words // 2 :], labels + words[num_words // 2 :], images, weight)


def pack_samples(samples: Sequence[Sample], family: Family) -> dict[str, Any]:
    """Arguments of ``Backbone.forward`` for samples packed back to back, their images encoded."""
    input_ids = torch.tensor([token for sample in samples for token in sample.input_ids])
    lengths = [len(sample.input_ids) for sample in samples]
    targets = torch.tensor([label for sample in samples for label in (*sample.labels[1:], -100)])
    images = [image for sample in samples for image in sample.images]
    features = torch.zeros(0, family.feature_dim("vision"))
    if images:
        tiles = [tile for image in images for tile in tiles_of(family.preprocess("vision", image))]
        rows = family.load_encoder("vision").encode(tiles)
        features = torch.cat(rows).clone()
    return {
        "input_ids": input_ids,
        "targets": targets,
        "weights": torch.cat([torch.full((n,), s.weight) for n, s in zip(lengths, samples, strict=True)]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "features": features,
        "feature_index": (input_ids == family.image_token_id).nonzero().squeeze(1),
    }


@pytest.fixture(scope="session")
def samples() -> Callable[[Family], list[Sample]]:
    """Single-image, text-only and multi-image samples of odd sizes and differing weights."""

    def make(family: Family) -> list[Sample]:
        return [
            make_sample(family, [(50, 20)], 9),
            make_sample(family, [], 14, weight=0.25),
            make_sample(family, [(13, 61), (28, 28), (100, 90)], 12, weight=2.0),
            make_sample(family, [(20, 20)], 4),
        ]

    return make


@pytest.fixture(scope="session")
def sample_of() -> Callable[..., Sample]:
    """``make_sample`` for tests."""
    return make_sample


@pytest.fixture(scope="session")
def pack() -> Callable[[Sequence[Sample], Family], dict[str, Any]]:
    """``pack_samples`` for tests."""
    return pack_samples


@pytest.fixture(scope="session")
def noise() -> Callable[..., Image.Image]:
    """``noise_image`` for tests."""
    return noise_image


@pytest.fixture(scope="session")
def language_configs() -> dict[str, dict[str, Any]]:
    """Tiny language models by name: tied with q/k norms, and untied."""
    return LANGUAGE_CONFIGS


@pytest.fixture(scope="session")
def tower_configs() -> dict[str, dict[str, Any]]:
    """Tiny vision towers by name."""
    return TOWER_CONFIGS


@pytest.fixture
def single_process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
