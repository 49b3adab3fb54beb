"""Models and data of the benchmark of modes: checkpoints for `model.path`, samples with the lengths of a trace."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from shared.random_tower import RANDOM_TOWER
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from flowtrain.config.run import RunConfig
from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sources.base import Turn
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = str(ROOT / "assets" / "tokenizer")
PICTURES = ROOT / "assets" / "openclipart" / "train.parquet"
TOKENS_PER_TILE = 256
"""Of the traces: a 448-pixel tile in patches of 14, with four patches merged to one, as in InternVL."""
QUICKSTART, REAL = "quickstart", "vit_s14+smollm2"


@dataclass(frozen=True)
class ModelSetting:
    """A model and the workload that two cores can train.

    modules: the sections ``model``, ``encoders.vision`` and ``backbone`` that name where its weights come from.
    encoder: further keys of ``encoders.vision``. feature_layer belongs to both.
    batch: samples of a step. steps: of a run, of which ``warm_up`` are not measured.
    full_length, full_batch: tokens of each sample where all are equal, and samples of a step.
    """

    modules: dict[str, Any]
    encoder: dict[str, Any]
    image_tokens: int
    microbatch_tokens: int
    batch: int
    steps: int
    warm_up: int
    full_length: int
    full_batch: int

    @property
    def scale(self) -> float:
        """Factor of the traces' lengths: an image of the model stands for a tile."""
        return self.image_tokens / TOKENS_PER_TILE


def model_settings(models_dir: Path | None, num_layers: int) -> dict[str, ModelSetting]:
    """The quickstart's shapes, and the real model if its modules are there; num_layers: decoder layers that it has."""
    from flowtrain.config.load import load_config

    quickstart = load_config(ROOT / "configs" / "quickstart.yaml")
    backbone = quickstart.backbone.config
    found = {
        QUICKSTART: ModelSetting(
            modules={
                "model": {"tokenizer": TOKENIZER},
                "encoder": {"config": RANDOM_TOWER, "feature_layer": -1},
                "backbone": {"config": backbone},
            },
            encoder={"feature_layer": -1, "max_batch_patches": 392},
            image_tokens=49,
            microbatch_tokens=512,
            batch=12,
            steps=60,
            warm_up=6,
            full_length=128,
            full_batch=16,
        )
    }
    if models_dir is not None:
        side = 112  # 64 patches of 14 x 14 pixels
        size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        found[REAL] = ModelSetting(
            modules={
                "model": {"chat_template": f"{TOKENIZER}/chat_template.jinja"},
                "encoder": {"path": str(models_dir / "vit_s14"), "image_processor": size},
                "backbone": {"path": str(models_dir / f"smollm2_135m_{num_layers}")},
            },
            encoder={"max_batch_patches": 256},
            image_tokens=64,
            microbatch_tokens=512,
            batch=6,
            steps=28,
            warm_up=4,
            full_length=128,
            full_batch=8,
        )
    return found


def cut_layers(models_dir: Path, num_layers: int) -> None:
    """Write the language model with its first decoder layers alone, unless that was done before."""
    to = models_dir / f"smollm2_135m_{num_layers}"
    if (to / "config.json").exists():
        return
    source = models_dir / "smollm2_135m"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(to)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((source / name).read_bytes())


def write_checkpoint(setting: ModelSetting, to: Path) -> Family:
    """Join the modules to one Llava checkpoint, from which all modes and the plain loop start; returns its family."""
    parts = setting.modules
    document = {
        "name": "parts",
        "model": parts["model"],
        "encoders": {"vision": parts["encoder"]},
        "backbone": parts["backbone"],
        "data": {"sources": [{"path": "unused"}]},
    }
    family = family_from_config(RunConfig.model_validate(document))
    family.export(family.load_backbone().state_dict(), to)
    return family


@dataclass(frozen=True)
class Mix:
    """Images and text tokens of samples, in order. origin: where the lengths come from."""

    name: str
    images: tuple[int, ...]
    text_tokens: tuple[int, ...]
    origin: str


# Shares of the numbers of tiles, and the parameters of a log-normal for the text tokens: the statistics of the traces.
GENERATED = {
    "ai2d": ({1: 0.467, 3: 0.299, 4: 0.048, 5: 0.186}, (3.95, 0.30)),
    "synthdog": ({3: 0.580, 5: 0.420}, (4.70, 0.40)),
}


def mix_of(name: str, trace: Path | None, count: int, scale: float) -> Mix:
    """Draw ``count`` samples with replacement from a trace, or from its statistics, with lengths times ``scale``."""
    rng = np.random.default_rng(41)
    if trace is not None:
        with trace.open() as file:
            rows = [(int(row["num_image_tiles"]), int(row["num_tokens"])) for row in csv.DictReader(file)]
        drawn = [rows[index] for index in rng.integers(len(rows), size=count)]
        images = [tiles for tiles, _ in drawn]
        texts = [tokens - TOKENS_PER_TILE * tiles for tiles, tokens in drawn]
        origin = f"{trace.name}, lengths times {scale:.2f}"
    else:
        shares, (mu, sigma) = GENERATED[name]
        images = rng.choice(list(shares), p=list(shares.values()), size=count).tolist()
        texts = np.exp(mu + sigma * rng.standard_normal(count)).astype(int).tolist()
        origin = f"generated with the statistics of {name}, lengths times {scale:.2f}"
    return Mix(name, tuple(images), tuple(max(1, round(scale * text)) for text in texts), origin)


def full_mix(count: int, setting: ModelSetting) -> Mix:
    """Equal samples of one image, so that batches of them have no padding and packed microbatches are full."""
    text = setting.full_length - setting.image_tokens
    return Mix("full", (1,) * count, (text,) * count, f"equal samples of {setting.full_length} tokens")


def write_samples(mix: Mix, tokenizer: PreTrainedTokenizerBase, to: Path) -> None:
    """Write a parquet file in the order of the mix: real pictures, words of one token each.

    A sample has exactly its text tokens, or the fewest that the chat template allows.
    """
    words = single_token_words(tokenizer)
    encoder = ConversationEncoder(tokenizer)
    pictures, rng = cycle(encoded_pictures()), np.random.default_rng(43)
    rows = []
    for images, text_tokens in zip(mix.images, mix.text_tokens, strict=True):
        # The tokens beside those of the words, and beside one for each image.
        fixed = len(encoder.encode(_turns(images, [], [words[0]])).ids) - images - 1
        count = max(2, text_tokens - fixed)
        chosen = [words[index] for index in rng.integers(len(words), size=count)]
        turns = _turns(images, chosen[: count // 2], chosen[count // 2 :])
        rows.append(
            {
                "images": [{"bytes": data, "path": None} for data in islice(pictures, images)],
                "texts": [{"user": turns[0].text, "assistant": turns[1].text}],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), to, row_group_size=64)


def _turns(images: int, question: Sequence[str], answer: Sequence[str]) -> tuple[Turn, Turn]:
    return Turn("user", "<image>" * images + "".join(question)), Turn("assistant", "ok" + "".join(answer))


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Words, each with a space before it, that the tokenizer makes one token of."""
    decoded = (tokenizer.decode([index]) for index in sorted(tokenizer.get_vocab().values()))
    plain = (word for word in decoded if word.startswith(" ") and word.isascii() and word[1:].isalpha())
    words = [word for word in plain if len(word) > 3 and word.islower()][:500]
    assert len(tokenizer("".join(words), add_special_tokens=False).input_ids) == len(words)
    return words


def encoded_pictures() -> Iterator[bytes]:
    """Encoded pictures of the repository's data, in order."""
    for row in pq.read_table(PICTURES, columns=["images"]).to_pylist():
        yield from (image["bytes"] for image in row["images"])
