"""Sizes samples from image headers and tokenizer alone: no image is decoded before it is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from flowtrain.config.data import DataConfig
from flowtrain.data.conversation import IGNORE_LABEL, ConversationEncoder, EncodedText
from flowtrain.data.images import image_size
from flowtrain.data.sources.base import BadSample, Buffer, RawSample
from flowtrain.types.samples import TEXT_PART, ImageLayout, PartSize, Rejection, RejectReason, SampleRef, SizedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ImageGeometry(Protocol):
    """What sizing needs to know of a model family."""

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """Names of the model's encoders; every image goes to the first."""

    @property
    def image_token_id(self) -> int:
        """Id of the token that stands for one vision token in the backbone's sequence."""

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Return the patches, rows and tokens of an image of ``width`` x ``height`` pixels."""

    def row_nbytes(self, encoder: str) -> int:
        """Return the bytes of one feature row."""


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """What sizing needs of a sample once its images were looked at; their bytes may lie elsewhere by then."""

    raw: RawSample
    """Its turns; the images' bytes are left out."""
    image_sizes: tuple[tuple[int, int], ...]
    """(width, height) of each image in pixels."""
    image_nbytes: tuple[int, ...]
    """Bytes of each encoded image."""


@dataclass(frozen=True, slots=True)
class LoadedSample:
    """A measured sample, and the bytes of each of its images."""

    measured: MeasuredSample
    data: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class SizedResult:
    """A sized sample and its text part."""

    sample: SizedSample
    text: npt.NDArray[np.int32]
    """Token ids, with each image expanded to its vision tokens, and unshifted labels (-100: no loss); C-contiguous
    int32 ``[2, num_tokens]``."""
    num_cut: int = 0
    """Tokens that ``data.oversized: truncate_text`` has cut from its end."""


class Sizer:
    """Turns raw samples into sized ones, or into rejections; raises ConfigError if the tokenizer cannot be used."""

    def __init__(self, family: ImageGeometry, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._family = family
        self._encoder = family.encoder_names[0]
        self._config = config
        image_token = tokenizer.convert_ids_to_tokens(family.image_token_id)
        assert isinstance(image_token, str)
        self._conversations = ConversationEncoder(tokenizer, config.system_prompt, image_token)

    def size(self, ref: SampleRef, raw: RawSample) -> SizedResult | Rejection:
        """Size one sample; raises SourceReadError if an image file cannot be read."""
        try:
            return self._size(ref, self.load(raw).measured)
        except BadSample as error:
            return error.rejection(ref)

    def load(self, raw: RawSample) -> LoadedSample:
        """Read a sample's images, and look at their headers.

        Raises BadSample, and SourceReadError if an image file cannot be read.
        """
        data = []
        left = self._config.max_image_nbytes
        for image in raw.images:
            data.append(image.read(left))
            left -= len(data[-1])
        sizes = tuple([self._image_size(index, image, len(data)) for index, image in enumerate(data)])
        nbytes = tuple([len(image) for image in data])
        return LoadedSample(MeasuredSample(replace(raw, images=()), sizes, nbytes), tuple(data))

    def size_measured(self, ref: SampleRef, measured: MeasuredSample) -> SizedResult | Rejection:
        """Size a sample whose images were looked at."""
        try:
            return self._size(ref, measured)
        except BadSample as error:
            return error.rejection(ref)

    def _size(self, ref: SampleRef, measured: MeasuredSample) -> SizedResult:
        encoded = self._conversations.encode(measured.raw.turns)
        layouts = [self._family.image_layout(self._encoder, *size) for size in measured.image_sizes]
        num_vision_tokens = sum(layout.num_tokens for layout in layouts)
        num_tokens = len(encoded.ids) - len(layouts) + num_vision_tokens
        is_oversized = num_tokens > self._config.max_seq_len
        if is_oversized and self._config.oversized == "reject":
            raise self._oversized(num_tokens, layouts)
        text = self._expand(encoded, layouts)
        num_cut = 0
        if is_oversized:
            text = self._cut(text, layouts)
            num_cut, num_tokens = num_tokens - text.shape[1], text.shape[1]
        parts = [PartSize(TEXT_PART, 1, 0, num_tokens, text.nbytes)]
        if layouts:
            parts.append(self._encoder_part(layouts))
        num_targets = _num_targets(text)
        sample = SizedSample(ref, num_tokens, num_vision_tokens, num_targets, tuple(parts), measured.image_nbytes)
        return SizedResult(sample, text, num_cut)

    def _cut(self, text: npt.NDArray[np.int32], layouts: list[ImageLayout]) -> npt.NDArray[np.int32]:
        """Cut the text after ``max_seq_len`` tokens; raises BadSample if this would cut an image or leave no loss."""
        limit = self._config.max_seq_len
        kept = np.ascontiguousarray(text[:, :limit])
        num_lost = int((text[0, limit:] == self._family.image_token_id).sum())
        if num_lost:
            raise self._oversized(text.shape[1], layouts, f", and cutting its end would cut {num_lost} image tokens")
        if not _num_targets(kept):
            raise self._oversized(text.shape[1], layouts, ", and cutting its end would leave no token that bears loss")
        return kept

    def _oversized(self, num_tokens: int, layouts: list[ImageLayout], why: str = "") -> BadSample:
        num_vision_tokens = sum(layout.num_tokens for layout in layouts)
        return BadSample(
            RejectReason.OVERSIZED_SAMPLE,
            f"{num_tokens} tokens ({num_vision_tokens} of them from {len(layouts)} images) are more than "
            f"data.max_seq_len ({self._config.max_seq_len}){why}",
        )

    def _image_size(self, index: int, data: Buffer, count: int) -> tuple[int, int]:
        try:
            return image_size(data, self._config.max_image_pixels)
        except BadSample as error:
            raise BadSample(error.reason, f"image {index + 1} of {count}: {error.detail}") from error

    def _encoder_part(self, layouts: list[ImageLayout]) -> PartSize:
        num_rows = sum(layout.num_rows for layout in layouts)
        return PartSize(
            name=self._encoder,
            num_items=len(layouts),
            num_patches=sum(layout.num_patches for layout in layouts),
            num_rows=num_rows,
            nbytes=num_rows * self._family.row_nbytes(self._encoder),
        )

    def _expand(self, encoded: EncodedText, layouts: list[ImageLayout]) -> npt.NDArray[np.int32]:
        """Repeat each image's token as often as it has vision tokens; int32 ``[2, num_tokens]``."""
        repeats = np.ones(len(encoded.ids), dtype=np.int64)
        repeats[encoded.ids == self._family.image_token_id] = [layout.num_tokens for layout in layouts]
        return np.repeat(np.stack([encoded.ids, encoded.labels]), repeats, axis=1)


def _num_targets(text: npt.NDArray[np.int32]) -> int:
    """Tokens that carry loss after the shift by one."""
    return int((text[1, 1:] != IGNORE_LABEL).sum())
