"""Samples of a parquet file as loops over an HF Llava model take them, and the collator that pads them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoProcessor

from flowtrain.data.conversation import IGNORE_LABEL, ConversationEncoder, EncodedText
from flowtrain.data.sources.base import Turn

PADDING = 0
"""Token id that pads; the mask hides it."""
Batch = dict[str, torch.Tensor]
Row = dict[str, Any]
"""Of a parquet file that ``_modes_data.write_samples`` wrote."""


class RowReader:
    """Makes pixels, token ids and labels of rows; ids and labels as in FlowTrain, so that losses can be compared."""

    def __init__(self, model: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(model)
        tokenizer = self._processor.tokenizer
        self._encoder = ConversationEncoder(tokenizer)
        self._image_token = tokenizer.convert_tokens_to_ids(self._processor.image_token)
        assert self._image_token != PADDING
        self._image_tokens: int | None = None

    def read(self, row: Row) -> Batch:
        """pixel_values: ``[images, 3, height, width]``, all of one size. input_ids, labels: ``[tokens]``."""
        pixels, text = self._pixels(row["images"]), self._text(row)
        ids, labels = torch.from_numpy(text.ids).long(), torch.from_numpy(text.labels).long()
        repeats = torch.where(ids == self._image_token, self._tokens_of(pixels), 1)
        return {
            "pixel_values": pixels,
            "input_ids": ids.repeat_interleave(repeats),
            "labels": labels.repeat_interleave(repeats),
        }

    def num_tokens(self, row: Row) -> int:
        """Tokens of text and images together."""
        if self._image_tokens is None:  # all images get the same size
            self._image_tokens = self._tokens_of(self._pixels(row["images"][:1]))
        return len(self._text(row).ids) + len(row["images"]) * (self._image_tokens - 1)

    def _pixels(self, images: list[dict[str, bytes]]) -> torch.Tensor:
        pictures = [Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in images]
        pixels: torch.Tensor = self._processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        return pixels

    def _text(self, row: Row) -> EncodedText:
        (turns,) = row["texts"]
        return self._encoder.encode((Turn("user", turns["user"]), Turn("assistant", turns["assistant"])))

    def _tokens_of(self, pixels: torch.Tensor) -> int:
        patch = self._processor.patch_size
        return int((pixels.shape[2] // patch) * (pixels.shape[3] // patch))


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, in order."""
    rows: list[Row] = pq.read_table(path).to_pylist()
    return rows


class Samples(Dataset[Batch]):
    """The rows of a file, in order, read when they are asked for."""

    def __init__(self, path: Path, model: Path) -> None:
        self._rows = read_rows(path)
        self._reader = RowReader(model)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        return self._reader.read(self._rows[index])

    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [self._reader.num_tokens(row) for row in self._rows]


def pad(samples: Sequence[Batch]) -> Batch:
    """Pad ids and labels on the right to the longest sample's; a mask says what is real. Pixels are joined."""
    ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PADDING),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_LABEL),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
    }


def pad_with_pixels(samples: Sequence[Batch]) -> Batch:
    """``pad``, and the pixels of all samples' images as one tensor."""
    return {**pad(samples), "pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}
