"""What is trained on: sources, their mixture, the order, what is rejected, evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flowtrain.config.base import ConfigModel


class SourceConfig(ConfigModel):
    """One data source.

    path: a parquet file, a directory of them, or a LLaVA JSON / JSONL file. format: by default told from the ending.
    image_root: directory that relative image paths start from (default: the file's own). weight: share in the mixture.
    """

    path: str
    format: Literal["auto", "parquet", "llava"] = "auto"
    name: str | None = None
    image_root: str | None = None
    weight: float = Field(1.0, gt=0)


class EvalConfig(ConfigModel):
    """Held-out evaluation: every ``every_steps`` steps the loss over the first ``max_samples`` samples of a source."""

    path: str
    format: Literal["auto", "parquet", "llava"] = "auto"
    image_root: str | None = None
    every_steps: int = Field(100, ge=1)
    max_samples: int = Field(256, ge=1)


class DataConfig(ConfigModel):
    """The training data.

    order: ``deterministic`` (steps and microbatch order depend on the seed alone) or ``arrival`` (steps are made of
    what is ready, within ``scheduler.lookahead_steps``). max_seq_len: what one sample may have, in backbone tokens.
    oversized: what happens to a longer one: ``reject`` it, or ``truncate_text`` at its end, never an image (where
    images alone are too long, or no loss-bearing token would be left, it is rejected as well).
    max_rejected_fraction: the run fails above it. max_image_pixels: larger images are rejected before decoding.
    system_prompt: put before every conversation, if given.
    """

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    order: Literal["deterministic", "arrival"] = "deterministic"
    max_seq_len: int = Field(2048, ge=8)
    oversized: Literal["reject", "truncate_text"] = "reject"
    max_rejected_fraction: float = Field(0.05, ge=0, le=1)
    max_image_pixels: int = Field(64_000_000, ge=1)
    shuffle: bool = True
    system_prompt: str | None = None
    eval: EvalConfig | None = None
