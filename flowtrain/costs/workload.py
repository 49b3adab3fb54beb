"""The work of each module: lengths and images of representative samples, and how they are batched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray, SampleFlops, sample_flops
from flowtrain.costs.model_spec import FROZEN_ENCODERS, ModelSpec
from flowtrain.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Workload:
    """Representative samples, all equally frequent, as int64 columns ``[S]``, and how a step batches them."""

    global_batch_size: int
    """Samples of a step."""
    microbatch_tokens: int
    """Capacity of a microbatch."""
    lengths: IntArray
    """Tokens of the backbone sequence."""
    vision_lengths: IntArray
    """Tokens among them that images fill."""
    target_lengths: IntArray
    """Tokens among them that carry loss."""
    images: Mapping[str, tuple[IntArray, IntArray]]
    """By encoder: images and patches of each sample."""
    fill: float = 0.97
    """Share of ``microbatch_tokens`` that packing fills."""
    freeze: tuple[str, ...] = FROZEN_ENCODERS
    """Modules that are not trained, as in ``config.frozen_modules``."""

    def __post_init__(self) -> None:
        if not len(self.lengths) or int(self.lengths.min()) < 1:
            raise ConfigError("the workload needs samples, each of at least one token; look at data.sources")
        if int(self.lengths.max()) > self.microbatch_tokens:
            raise ConfigError(
                f"the longest sample of the workload ({int(self.lengths.max())} tokens) is above "
                f"scheduler.microbatch_tokens ({self.microbatch_tokens}); raise the second or lower data.max_seq_len"
            )

    @cached_property
    def tokens_per_sample(self) -> float:
        """Mean length."""
        return float(self.lengths.mean())

    def tokens_at(self, percent: int) -> int:
        """Return the length that so many percent of the samples do not exceed."""
        return int(np.percentile(self.lengths, percent, method="inverted_cdf"))

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a global batch."""
        return self.global_batch_size * self.tokens_per_sample

    def fullest_tokens(self, dp: IntArray) -> FloatArray:
        """Return the tokens of a step on the fullest of ``dp`` ranks, at least; ``[N]``.

        Ranks get whole samples, so some have one sample more than the mean; a good packing gives them short ones. With
        samples of one length this is exact: 8 of them on 5 ranks are 2 on the slowest, not 1.6.
        """
        mean = self.global_batch_size / dp
        return mean * self.tokens_per_sample + (np.ceil(mean - 1e-9) - mean) * float(self.lengths.min())

    def num_microbatches(self, dp: IntArray) -> IntArray:
        """Return the microbatches of a step on each of ``dp`` ranks, ``[N]``; all have the same number."""
        each = self.fullest_tokens(dp) / (self.microbatch_tokens * self.fill)
        return np.maximum(np.ceil(each - 1e-9), 1.0).astype(np.int64)

    @cached_property
    def target_share(self) -> float:
        """Share of tokens that carry loss."""
        return float(self.target_lengths.sum() / self.lengths.sum())

    @cached_property
    def vision_share(self) -> float:
        """Share of tokens that images fill."""
        return float(self.vision_lengths.sum() / self.lengths.sum())

    def to_dict(self) -> dict[str, int | float]:
        """Return a summary, as plain values for JSON."""
        return {
            "num_samples": len(self.lengths),
            "global_batch_size": self.global_batch_size,
            "microbatch_tokens": self.microbatch_tokens,
            "tokens_per_sample": self.tokens_per_sample,
            "tokens_p5": self.tokens_at(5),
            "tokens_p95": self.tokens_at(95),
            "vision_share": self.vision_share,
            "target_share": self.target_share,
        }

    def share(self, encoder: str) -> float:
        """Share of samples that have images for an encoder."""
        return float((self.images[encoder][0] > 0).mean())

    def flops(self, model: ModelSpec) -> SampleFlops:
        """Return the training FLOPs of each sample."""
        return self._flops(model, self.target_lengths, self.images)

    def head_flops(self, model: ModelSpec) -> float:
        """Return the mean training FLOPs of the backbone's head per sample."""
        without = self._flops(model, np.zeros_like(self.target_lengths), {})
        return float((self.flops(model).backbone - without.backbone).mean())

    def encoder_flops(self, model: ModelSpec, encoder: str) -> float:
        """Return one encoder's mean FLOPs per sample that has images for it."""
        return float(self.images_flops(model, encoder).sum()) / max(int((self.images[encoder][0] > 0).sum()), 1)

    def images_flops(self, model: ModelSpec, encoder: str) -> FloatArray:
        """Return one encoder's FLOPs for each sample, ``[S]``."""
        return self._flops(model, self.target_lengths, {encoder: self.images[encoder]}).encoders

    def _flops(
        self, model: ModelSpec, target_lengths: IntArray, images: Mapping[str, tuple[IntArray, IntArray]]
    ) -> SampleFlops:
        return sample_flops(
            model,
            positions=np.arange(len(self.lengths)),
            lengths=self.lengths,
            vision_lengths=self.vision_lengths,
            target_lengths=target_lengths,
            images=images,
            freeze=self.freeze,
        )
