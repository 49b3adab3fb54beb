"""Assembly of a packed microbatch from its samples' arrays; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from flowtrain.errors import DataError

IGNORED_LABEL = -100
LossNormalization = Literal["token", "sample"]
_NOT_FORWARDED = frozenset(
    {"num_samples", "num_tokens", "num_target_tokens", "images", "positions", "targets_per_sample"}
)
"""Fields of a batch that the model does not take."""


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """One sample's data from the pool."""

    position: int
    text: np.ndarray
    """int32 [2, T]: token ids with images expanded, and unshifted labels (-100: no loss); or [5, T]: and positions of
    three axes."""
    features: torch.Tensor | None
    """[rows, D] of all its images in order; None without images."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample's text; its features come later."""

    position: int
    text: np.ndarray
    """As of ``SampleArrays``."""
    num_rows: int
    """Feature rows of all its images."""


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of a microbatch for encoder stages, in the order of their feature rows."""

    sizes: tuple[tuple[int, int], ...]
    """Height and width (pixels) of each image as it enters the tower; known to all ranks."""
    pixels: tuple[torch.Tensor, ...] = ()
    """[C, H, W] of each image, float32; empty on ranks without the first encoder stage."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch as the backbone takes it: T tokens of S sequences, R feature rows.

    The three totals count real samples only: they are zero for the weightless microbatch.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    targets: torch.Tensor
    """int64 [T], shifted; -100 for no target."""
    weights: torch.Tensor
    """float32 [T], the weight of each token's loss."""
    position_ids: torch.Tensor
    """int64 [T], starting at 0 in every sequence; [3, T] if a sample has positions of three axes."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], offsets of the sequences, from 0 to T."""
    max_seqlen: int
    features: torch.Tensor
    """[R, D], in the compute type."""
    feature_index: torch.Tensor
    """int64 [R], the token that each row replaces."""
    target_index: torch.Tensor
    """int64 [n], the tokens that have a target."""
    sequence_lengths: tuple[int, ...]
    """Tokens of each sequence, on the host."""
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    images: ImageBatch | None = None
    """What the pipeline's encoder stages take; None without them. ``features`` is empty then, [0, D]."""
    next_index: torch.Tensor | None = None
    """int64 [n], the tokens after which the likeliest ones are asked for instead of the loss; None: the loss is."""
    positions: tuple[int, ...] = ()
    """Of its samples, in the order of their sequences; empty for the weightless microbatch."""
    targets_per_sample: tuple[int, ...] = ()
    """Tokens of each sample that carry loss."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the batch."""
        own = [value for field in fields(self) if isinstance(value := getattr(self, field.name), torch.Tensor)]
        return [*own, *(self.images.pixels if self.images is not None else ())]

    def with_features(self, features: torch.Tensor) -> PackedBatch:
        """Return this batch with these feature rows, [R, D] of all its samples in order."""
        assert features.shape == (len(self.feature_index), self.features.shape[1]), (
            features.shape,
            self.features.shape,
        )
        return replace(self, features=features.to(self.features))

    def forward_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``Backbone.forward``."""
        names = [field.name for field in fields(self) if field.name not in _NOT_FORWARDED]
        return {name: getattr(self, name) for name in names}


def build_batch(
    samples: Sequence[SampleArrays],
    *,
    image_token_id: int,
    feature_dim: int,
    dtype: torch.dtype,
    loss_normalization: LossNormalization,
    device: torch.device,
    pad_token_id: int = 0,
    with_features: bool = True,
) -> PackedBatch:
    """Pack samples with their features into one sequence, as ``pack_texts``.

    Raises DataError also if a sample's feature rows do not have ``feature_dim`` columns.
    """
    for sample in samples:
        _check_width(sample, feature_dim)
    rows = [sample.features for sample in samples if sample.features is not None]
    texts = [SampleText(s.position, s.text, 0 if s.features is None else s.features.shape[0]) for s in samples]
    batch = pack_texts(
        texts,
        image_token_id=image_token_id,
        feature_dim=feature_dim,
        dtype=dtype,
        loss_normalization=loss_normalization,
        device=device,
        pad_token_id=pad_token_id,
        with_features=with_features,
    )
    return batch.with_features(torch.cat(rows)) if rows and with_features else batch


def pack_texts(
    samples: Sequence[SampleText],
    *,
    image_token_id: int,
    feature_dim: int,
    dtype: torch.dtype,
    loss_normalization: LossNormalization,
    device: torch.device,
    pad_token_id: int = 0,
    with_features: bool = True,
) -> PackedBatch:
    """Pack samples into one sequence without feature rows: ``PackedBatch.with_features`` adds them.

    An empty list gives the weightless microbatch (one token of zero weight). Labels are shifted within each sample, so
    its last token has no target. with_features: False for a pipeline stage that does not use features. Raises DataError
    if a sample's image tokens and feature rows differ in number, or if its loss is undefined (no target token under
    ``sample``).
    """
    if not samples:
        return weightless(feature_dim, dtype, device, pad_token_id)
    texts = [np.asarray(sample.text, dtype=np.int64) for sample in samples]
    targets = [_shift(text[1]) for text in texts]
    num_targets = [int(np.count_nonzero(target != IGNORED_LABEL)) for target in targets]
    for sample, text, count in zip(samples, texts, num_targets, strict=True):
        if with_features:
            _check_rows(sample, text, image_token_id)
        _check_loss(sample, count, loss_normalization)
    weights = [
        (target != IGNORED_LABEL) * np.float32(1.0 if loss_normalization == "token" else 1.0 / count)
        for target, count in zip(targets, num_targets, strict=True)
    ]
    lengths = [text.shape[1] for text in texts]
    input_ids, all_targets = np.concatenate([text[0] for text in texts]), np.concatenate(targets)
    replaced = np.flatnonzero(input_ids == image_token_id) if with_features else np.zeros(0)

    def tensor(array: np.ndarray, array_dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=array_dtype)

    return PackedBatch(
        input_ids=tensor(input_ids, torch.int64),
        targets=tensor(all_targets, torch.int64),
        weights=tensor(np.concatenate(weights), torch.float32),
        position_ids=tensor(_positions(texts), torch.int64),
        cu_seqlens=tensor(np.cumsum([0, *lengths]), torch.int32),
        max_seqlen=max(lengths),
        features=torch.zeros(0, feature_dim, dtype=dtype, device=device),
        feature_index=tensor(replaced, torch.int64),
        target_index=tensor(np.flatnonzero(all_targets != IGNORED_LABEL), torch.int64),
        sequence_lengths=tuple(lengths),
        num_samples=len(samples),
        num_tokens=sum(lengths),
        num_target_tokens=sum(num_targets),
        positions=tuple(sample.position for sample in samples),
        targets_per_sample=tuple(num_targets),
    )


def _positions(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Positions of all tokens, [T]; [3, T] if a text has three axes: the others then count alike on all."""
    counted = [text[2:] if len(text) > 2 else np.arange(text.shape[1]) for text in texts]
    if all(each.ndim == 1 for each in counted):
        return np.concatenate(counted)
    return np.concatenate([np.broadcast_to(each, (3, each.shape[-1])) for each in counted], axis=1)


def _shift(labels: np.ndarray) -> np.ndarray:
    return np.append(labels[1:], IGNORED_LABEL)


def _check_rows(sample: SampleText, text: np.ndarray, image_token_id: int) -> None:
    num_image_tokens = int(np.count_nonzero(text[0] == image_token_id))
    if num_image_tokens != sample.num_rows:
        raise DataError(
            f"position {sample.position}: {num_image_tokens} image tokens in its text but {sample.num_rows} feature "
            "rows; the sizing of its images and its encoder disagree"
        )


def _check_width(sample: SampleArrays, feature_dim: int) -> None:
    if sample.features is not None and sample.features.shape[1] != feature_dim:
        raise DataError(
            f"position {sample.position}: feature rows of width {sample.features.shape[1]} but the connector takes "
            f"{feature_dim}; the encoder and the connector belong to different models"
        )


def _check_loss(sample: SampleText, num_targets: int, loss_normalization: LossNormalization) -> None:
    if num_targets == 0 and loss_normalization == "sample":
        raise DataError(
            f"position {sample.position}: no token carries loss, so its mean is undefined "
            "(training.loss_normalization: sample); such samples must be rejected when they are sized"
        )


def weightless(feature_dim: int, dtype: torch.dtype, device: torch.device, pad_token_id: int = 0) -> PackedBatch:
    """Return the microbatch of a rank that has nothing to run while others do: one token of zero weight."""

    def tensor(values: list[int], tensor_dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=tensor_dtype, device=device)

    return PackedBatch(
        input_ids=tensor([pad_token_id]),
        targets=tensor([IGNORED_LABEL]),
        weights=tensor([0], torch.float32),
        position_ids=tensor([0]),
        cu_seqlens=tensor([0, 1], torch.int32),
        max_seqlen=1,
        features=torch.zeros(0, feature_dim, dtype=dtype, device=device),
        feature_index=tensor([]),
        target_index=tensor([]),
        sequence_lengths=(1,),
        num_samples=0,
        num_tokens=0,
        num_target_tokens=0,
    )
