"""Data whose samples are all alike, and actors that stay on one core, as their device."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _pinned import stay_on
from PIL import Image

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.controller.worker_group import ActorClasses

_WORDS = ("red", "apple", "green", "tree", "house", "dog", "cat", "over", "the", "river", "bright", "moon", "boat")
_SIDE = 256
_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)


def write_data(path: Path, num_samples: int, seed: int = 0) -> None:
    """Write samples of one photograph-like image and a few words each, so that steps hardly differ."""
    words, pixels = random.Random(seed), np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " ".join(words.choice(_WORDS) for _ in range(words.randint(low, high)))

    rows = [
        {
            "images": [{"bytes": _image(pixels), "path": None}],
            "texts": [{"user": text(4, 8), "assistant": text(8, 16)}],
        }
        for _ in range(num_samples)
    ]
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), path, row_group_size=16)


def _image(generator: np.random.Generator) -> bytes:
    """A JPEG of coarse random colours; decoding it takes as long as for a photograph."""
    coarse = generator.integers(0, 255, (_SIDE // 16, _SIDE // 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


class EncoderOnFirst(Encoder):
    """An encoder on the first core."""

    def __init__(self, *args: Any) -> None:
        stay_on(0)
        super().__init__(*args)


class BackboneOnFirst(BackboneRank):
    """A backbone rank on the first core."""

    def __init__(self, *args: Any) -> None:
        stay_on(0)
        super().__init__(*args)


class BackboneOnSecond(BackboneRank):
    """A backbone rank on the second core."""

    def __init__(self, *args: Any) -> None:
        stay_on(1)
        super().__init__(*args)


ON_TWO_CORES = ActorClasses(encoder=EncoderOnFirst, backbone=BackboneOnSecond)
ON_ONE_CORE = ActorClasses(encoder=EncoderOnFirst, backbone=BackboneOnFirst)
