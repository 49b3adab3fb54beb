"""Small data sets and configurations for tests that run the whole flow."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "assets" / "tokenizer"

WORDS = ("red", "apple", "green", "tree", "house", "dog", "cat", "over", "the", "river", "bright", "moon", "boat")

PARQUET_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)


@dataclass
class World:
    """Rows to train on, written as one parquet file; ``rng`` makes every row different and every run the same."""

    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.rows: list[dict[str, Any]] = []

    def words(self, low: int, high: int) -> str:
        """A few words."""
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(low, high)))

    def image(self) -> bytes:
        """A PNG of random content, size and aspect ratio."""
        width, height = self.rng.randint(20, 80), self.rng.randint(20, 80)
        pixels = np.random.default_rng(self.rng.randrange(1 << 30)).integers(0, 255, (height, width, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    def add(self, num_images: int, images: list[bytes] | None = None, answer: str | None = None) -> None:
        """Add a sample; its own images or answer replace the random ones."""
        images = [self.image() for _ in range(num_images)] if images is None else images
        turns = [{"user": self.words(2, 9), "assistant": self.words(1, 12) if answer is None else answer}]
        if self.rng.random() < 0.3 and answer is None:
            turns.append({"user": self.words(2, 5), "assistant": self.words(1, 20)})
        self.rows.append({"images": [{"bytes": data, "path": None} for data in images], "texts": turns})

    def add_mixed(self, count: int) -> None:
        """Add samples with no, one and several images in turn."""
        for index in range(count):
            self.add((1, 0, 2, 1, 3, 1, 0, 1)[index % 8])

    def truncated_image(self) -> bytes:
        """A PNG whose header is fine and whose data breaks off: it is sized, planned, and only then found bad."""
        data = self.image()
        return data[: len(data) // 2]

    def write(self, path: Path) -> Path:
        """Write the rows."""
        pq.write_table(pa.Table.from_pylist(self.rows, PARQUET_SCHEMA), path, row_group_size=16)
        return path


def tiny_config(tmp_path: Path, source: Path, name: str = "tiny", *overrides: str, **sections: Any) -> RunConfig:
    """A run of a very small model on ``source``: two encoder actors, fractions of a CPU each.

    sections: keys to add to or change in whole sections; overrides: single dotted keys.
    """
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    }
    values: dict[str, Any] = {
        "name": name,
        "runs_dir": str(tmp_path / "runs"),
        "model": {"tokenizer": str(TOKENIZER), "device": "cpu"},
        "encoders": {
            "vision": {
                "config": vision,
                "data_parallel_size": 2,
                "num_cpus": 0.1,
                "max_batch_patches": 12,
                "segment_nbytes": 4 << 20,
            }
        },
        "backbone": {"config": text, "num_cpus": 0.1},
        "data": {
            "sources": [{"path": str(source)}],
            "max_seq_len": 128,
            "max_image_nbytes": 1 << 17,
            "max_rejected_fraction": 0.5,
        },
        "training": {"global_batch_size": 8, "max_steps": 4, "learning_rate": 1e-3, "lr_schedule": "constant"},
        "scheduler": {"microbatch_tokens": 128},
        "checkpoint": {"every_steps": 1000},
        "limits": {"stall_timeout_s": 600.0, "stall_warning_s": 20.0},
        "observability": {"progress": "off", "dashboard": False},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return override_config(RunConfig.model_validate(values), overrides)
