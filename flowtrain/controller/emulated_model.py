"""A run on emulated devices from a model file of ``configs/models``: its shapes, and data with its lengths.

The data have no content. A picture is a PNG of its header alone, which is all that sizing reads, and as many zeros as
an encoded picture of that size may have; a text is one word over and over.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from flowtrain.allocator.model_file import read_model_file
from flowtrain.config.home import expanded
from flowtrain.config.load import override_config
from flowtrain.config.messages import Document, refused
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import parse_yaml
from flowtrain.controller.planning.planned import MODEL_FILE_BATCH_PATCHES
from flowtrain.costs.workload import Workload
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import IMAGE_PLACEHOLDER, RawSample, Turn
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.samples import Rejection, SampleRef

WORD = " a"
_ROWS = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)
_ROWS_A_BLOCK = 64


def emulated_run(
    model_file: str | PathLike[str],
    directory: str | PathLike[str],
    tokenizer: str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    num_samples: int = 1024,
    seed: int = 0,
    bytes_per_pixel: float = 0.2,
) -> RunConfig:
    """Write ``num_samples`` samples of a model file's lengths into ``directory``; returns the run that trains on them.

    Its settings are those with which ``flowtrain plan`` plans the file, on emulated devices; overrides may change any.
    bytes_per_pixel: of an encoded picture. Raises ConfigError.
    """
    file, target = read_model_file(expanded(model_file)), Path(directory) / f"{Path(model_file).stem}.parquet"
    raw = parse_yaml(expanded(model_file).read_text(encoding="utf-8"))[0]
    if len(raw["encoders"]) != 1:
        raise ConfigError.of(
            "encoders",
            FaultCode.ENCODERS,
            f"{model_file}: encoders has {len(raw['encoders'])} entries, and a run has one; take another model file",
        )
    ((encoder, shapes),) = raw["encoders"].items()
    workload, patch = file.workload, int(shapes["patch_size"])
    drawn = np.random.default_rng(seed).permutation(np.arange(num_samples) % len(workload.lengths))
    grids = [_grids(workload, encoder, int(sample)) for sample in drawn]
    side = max((max(grid) for each in grids for grid in each), default=1)
    pixels = max((sum(rows * columns for rows, columns in each) for each in grids), default=1) * patch**2
    values: dict[str, Any] = {
        "name": f"{file.name}-emulated",
        "model": {
            "family": "variable_llava",
            "tokenizer": str(tokenizer),
            "dtype": "bfloat16",
            "device": "emulated",
        },
        "encoders": {
            encoder: {
                "config": shapes,
                "feature_layer": -1,
                "image_processor": {"size": {"longest_edge": side * patch}},
                "max_batch_patches": MODEL_FILE_BATCH_PATCHES,
            }
        },
        "backbone": {"config": raw["backbone"], "activation_checkpointing": "full"},
        "data": {
            "sources": [{"path": str(target)}],
            "max_seq_len": int(workload.lengths.max()),
            "max_image_nbytes": max(1 << 10, math.ceil(pixels * bytes_per_pixel) + 1024 * max(map(len, grids))),
        },
        "training": {"global_batch_size": workload.global_batch_size, "max_steps": 10},
        "scheduler": {"microbatch_tokens": workload.microbatch_tokens},
        "observability": {"dashboard": False},
    }
    try:
        config = override_config(RunConfig.model_validate(values), overrides, check_paths=False)
    except ValidationError as error:
        raise refused(Document(str(model_file), values), error) from error
    _write(config, workload, drawn, grids, patch, bytes_per_pixel, target)
    return config


def _grids(workload: Workload, encoder: str, sample: int) -> list[tuple[int, int]]:
    """Rows and columns of patches of a sample's images, which have equal shares of its patches."""
    num_images, num_patches = (int(column[sample]) for column in workload.images[encoder])
    shares = [num_patches // num_images + (each < num_patches % num_images) for each in range(num_images)]
    return [grid_of(share) for share in shares]


def grid_of(num_patches: int) -> tuple[int, int]:
    """Return rows and columns whose product is nearest to a number, and neither of which is far larger."""
    root = math.isqrt(num_patches)
    pairs = [(rows, round(num_patches / rows)) for rows in range(max(1, math.ceil(root / 1.5)), root + 1)]
    return min(pairs, key=lambda pair: (abs(pair[0] * pair[1] - num_patches), pair[1] - pair[0]))


def header_png(width: int, height: int, nbytes: int) -> bytes:
    """Return a PNG of this size (pixels) without an image: its header, and zeros in place of the compressed data."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    zeros = max(nbytes - len(start) - 8, 1)
    return start + struct.pack(">I", zeros) + b"IDAT" + bytes(zeros)


def _write(
    config: RunConfig,
    workload: Workload,
    drawn: np.ndarray,
    grids: Sequence[Sequence[tuple[int, int]]],
    patch: int,
    bytes_per_pixel: float,
    path: Path,
) -> None:
    overhead = _overhead_tokens(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, _ROWS) as writer:
        for first in range(0, len(drawn), _ROWS_A_BLOCK):
            rows = []
            for number in range(first, min(first + _ROWS_A_BLOCK, len(drawn))):
                sample, shapes = int(drawn[number]), grids[number]
                sizes = [(columns * patch, rows_ * patch) for rows_, columns in shapes]
                images = [
                    {"bytes": header_png(*size, round(size[0] * size[1] * bytes_per_pixel)), "path": None}
                    for size in sizes
                ]
                vision = sum(rows_ * columns for rows_, columns in shapes)
                text = max(int(workload.lengths[sample]) - vision - overhead, 2)
                targets = min(max(int(workload.target_lengths[sample]), 1), text - 1)
                user = IMAGE_PLACEHOLDER * len(shapes) + WORD * (text - targets)
                texts = [{"user": user, "assistant": WORD * targets}]
                rows.append({"images": images, "texts": texts})
            writer.write_table(pa.Table.from_pylist(rows, _ROWS), row_group_size=_ROWS_A_BLOCK)


def _overhead_tokens(config: RunConfig) -> int:
    """Tokens of a conversation in addition to those of its words and images."""
    family, words = family_from_config(config), 8
    sizer = Sizer(family, family.tokenizer, config.data)
    ref = SampleRef(0, 0, 0, 0)
    loaded = sizer.load(ref, RawSample((), (Turn("user", WORD * words), Turn("assistant", WORD * words))))
    assert not isinstance(loaded, Rejection), loaded
    result = sizer.size(ref, loaded.measured)
    assert isinstance(result, SizedResult), result
    return result.sample.num_tokens - 2 * words
