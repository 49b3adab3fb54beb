"""What every outside peer of ``end_to_end.py`` is asked for, and what it answers, from a process of its own."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0
"""FlowTrain's own; weight decay is 0, the learning rate constant."""


@dataclass(frozen=True)
class PeerJob:
    """Steps of a fixed batch over samples in their order.

    batch: samples of a step, of all processes together. size: samples of a microbatch of one process.
    threads: of torch in each process. workers: processes that read ahead for each training process. balanced: whether a
    step's samples are sorted into microbatches of like cost, not taken in their order; 0 or 1.
    """

    model: Path
    samples: Path
    batch: int
    size: int
    steps: int
    learning_rate: float
    processes: int
    threads: int
    balanced: int = 0
    workers: int = 1

    @property
    def microbatches(self) -> int:
        """Of a process in a step."""
        return self.batch // (self.size * self.processes)

    def arguments(self) -> list[str]:
        """The command line that ``read_job`` takes."""
        return [f"--{name}={value}" for name, value in asdict(self).items()]


def read_job() -> PeerJob:
    """Read a job from the command line."""
    parser = argparse.ArgumentParser()
    for name in ("model", "samples"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("batch", "size", "steps", "processes", "threads", "balanced", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    return PeerJob(**vars(parser.parse_args()))


def load_model(path: Path) -> Any:
    """The checkpoint in float32, to be trained but for its vision tower."""
    model: Any = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.train().model.vision_tower.requires_grad_(False)
    return model


def answer(ended_s: list[float], losses: list[float], version: str, began_s: float | None = None) -> None:
    """Print what was measured.

    ended_s: of each step, since the epoch. losses: means over a step's target tokens. began_s: when the work of the run
    began, if all of it counts; None: steps after the warm-up count.
    """
    print(json.dumps({"ended_s": ended_s, "losses": losses, "version": version, "began_s": began_s}), flush=True)
