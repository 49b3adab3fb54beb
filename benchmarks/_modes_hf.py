"""The plain loop that a user would write: an HF Llava model, a DataLoader, AdamW. Prints one JSON object.

python benchmarks/_modes_hf.py MODEL SAMPLES --batch N --microbatch N --steps N --learning-rate F

Takes a parquet file whose samples have one picture and equal lengths, in their order, so nothing is padded or masked.
A worker process decodes and tokenises ahead, as in FlowTrain's own runs; the model runs on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _hf_samples import Batch, Samples
from torch.utils.data import DataLoader
from transformers import LlavaForConditionalGeneration

from flowtrain.data.conversation import IGNORE_LABEL

PREFETCHED = 4
"""Microbatches that the worker reads ahead."""


class OnePictureSamples(Samples):
    """Samples of one picture each, so that their pixels stack."""

    def __getitem__(self, index: int) -> Batch:
        sample = super().__getitem__(index)
        return {**sample, "pixel_values": sample["pixel_values"][0]}


def steps(loader: DataLoader[Batch], microbatches: int) -> Iterator[list[Batch]]:
    """The microbatches of each step."""
    found: list[Batch] = []
    for batch in loader:
        found.append(batch)
        if len(found) == microbatches:
            yield found
            found = []


class Loop:
    """One training step after another; only the vision tower is frozen."""

    def __init__(self, model: Path, learning_rate: float) -> None:
        loaded = LlavaForConditionalGeneration.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._model = loaded.train()
        self._model.model.vision_tower.requires_grad_(False)
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batches: list[Batch]) -> float:
        """Accumulate over the microbatches, clip, update; returns the mean loss of all tokens that have a target."""
        num_targets = sum(int((batch["labels"][:, 1:] != IGNORE_LABEL).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss: Any = self._model(**batch, use_cache=False, num_items_in_batch=num_targets).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = Loop(args.model, args.learning_rate)
    loader = DataLoader(
        OnePictureSamples(args.samples, args.model),
        batch_size=args.microbatch,
        num_workers=1,
        prefetch_factor=PREFETCHED,
    )
    ended_s, losses, num_tokens = [], [], []
    for batches in steps(loader, args.batch // args.microbatch):
        losses.append(loop.step(batches))
        ended_s.append(time.time())
        num_tokens.append(sum(batch["input_ids"].numel() for batch in batches))
        if len(losses) == args.steps:
            break
    print(json.dumps({"ended_s": ended_s, "losses": losses, "tokens": num_tokens}))


if __name__ == "__main__":
    main()
