"""What is trained on: sources, their mixture, the order, what is rejected, evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flowtrain.config.base import ConfigModel


class SourceConfig(ConfigModel):
    """One data source."""

    path: str
    """A parquet file, a directory of parquet files, or a LLaVA JSON or JSONL file."""
    format: Literal["auto", "parquet", "llava"] = "auto"
    """``auto``: chosen by the file's ending."""
    name: str | None = None
    image_root: str | None = None
    """Directory that relative image paths start from; None: the directory of the file."""
    weight: float = Field(1.0, gt=0)
    """Share in the mixture, relative to the other sources' weights."""


class EvalConfig(ConfigModel):
    """Held-out evaluation: every ``every_steps`` steps the loss over the first ``max_samples`` samples of a source."""

    path: str
    format: Literal["auto", "parquet", "llava"] = "auto"
    image_root: str | None = None
    every_steps: int = Field(100, ge=1)
    max_samples: int = Field(256, ge=1)


class DataConfig(ConfigModel):
    """The training data."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    order: Literal["deterministic", "arrival"] = "deterministic"
    """``deterministic``: steps and the order of microbatches depend on the seed alone. ``arrival``: steps are built
    from the samples that are ready, within ``scheduler.lookahead_steps``."""
    max_seq_len: int = Field(2048, ge=8)
    """The most backbone tokens that one sample may have."""
    oversized: Literal["reject", "truncate_text"] = "reject"
    """What happens to a longer sample: it is rejected, or its text is cut at the end. Images are never cut: a sample is
    also rejected if its images alone are too long, or if no token with loss would be left."""
    max_rejected_fraction: float = Field(0.05, ge=0, le=1)
    """The run fails when a larger share of the samples is rejected."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Larger images are rejected before they are decoded."""
    shuffle: bool = True
    system_prompt: str | None = None
    """Put before every conversation, if given."""
    eval: EvalConfig | None = None
