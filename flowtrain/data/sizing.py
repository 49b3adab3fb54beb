"""Sizes samples from image headers and tokenizer alone: no image is decoded before it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from flowtrain.config.data import DataConfig
from flowtrain.data.conversation import IGNORE_LABEL, ConversationEncoder, EncodedText
from flowtrain.data.images import image_size
from flowtrain.data.positions import grid_positions
from flowtrain.data.rejections import errors_of_image, rejected
from flowtrain.data.sources.base import BadSample, Buffer, RawImage, RawSample, Turn
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

    @property
    def image_text(self) -> str:
        """What ``<image>`` becomes before it is expanded: the image token, perhaps between tokens that frame it."""

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Return the patches, rows and tokens of an image of ``width`` x ``height`` pixels."""

    def row_nbytes(self, encoder: str) -> int:
        """Return the bytes of one feature row."""


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """What sizing needs of a sample once its images were looked at; their bytes may lie elsewhere by then."""

    turns: tuple[Turn, ...]
    id: str | None
    layouts: tuple[ImageLayout, ...]
    """Sizes that follow from each image."""
    image_nbytes: tuple[int, ...]
    """Bytes of each encoded image; empty if images are not kept."""


@dataclass(frozen=True, slots=True)
class LoadedSample:
    """A measured sample and its encoded images."""

    measured: MeasuredSample
    images: tuple[Buffer, ...]
    """In order; together at most ``data.max_image_nbytes``. Empty if images are not kept."""


@dataclass(frozen=True, slots=True)
class SizedResult:
    """A sized sample and its text part."""

    sample: SizedSample
    text: npt.NDArray[np.int32]
    """Token ids, with each image expanded to its vision tokens, and unshifted labels (-100: no loss); C-contiguous
    int32 ``[2, num_tokens]``. With images that have a grid, three more rows are the positions (``grid_positions``)."""
    num_cut: int = 0
    """Tokens that ``data.oversized: truncate_text`` has cut from its end."""


class Sizer:
    """Turns raw samples into sized ones, or into rejections; raises ConfigError if the tokenizer cannot be used.

    A sample of more than ``data.max_text_nbytes`` bytes of text, or of more turns than ``data.max_seq_len``, is
    rejected before its text is tokenised, also with ``data.oversized: truncate_text``.

    keeps_images: False in ``mode: llm_only``: images count as tokens, but nobody reads them, so sized samples have no
        part and no bytes for them.
    """

    def __init__(
        self,
        family: ImageGeometry,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        keeps_images: bool = True,
    ) -> None:
        self._family = family
        self._keeps_images = keeps_images
        self._encoder = family.encoder_names[0]
        self._config = config
        image_token = tokenizer.convert_ids_to_tokens(family.image_token_id)
        assert isinstance(image_token, str)
        self._conversations = ConversationEncoder(
            tokenizer, config.system_prompt, image_token, image_text=family.image_text
        )

    def load(self, ref: SampleRef, raw: RawSample) -> LoadedSample | Rejection:
        """Read a sample's images, and look at their headers.

        Whatever is raised on the way becomes a rejection, but for SourceReadError if an image file cannot be read, and
        MemoryError.
        """
        try:
            images, layouts = self._read_images(raw.images)
        except BaseException as error:
            return rejected(ref, error, raw.id)
        if not self._keeps_images:
            images = ()
        nbytes = tuple([len(image) for image in images])
        return LoadedSample(MeasuredSample(raw.turns, raw.id, layouts, nbytes), images)

    def size(self, ref: SampleRef, measured: MeasuredSample) -> SizedResult | Rejection:
        """Size a sample whose images were looked at; rejects it as ``load`` does."""
        try:
            return self._size(ref, measured)
        except BaseException as error:
            return rejected(ref, error, measured.id)

    def _size(self, ref: SampleRef, measured: MeasuredSample) -> SizedResult:
        self._check_text(measured.turns)
        encoded = self._conversations.encode(measured.turns, self._config.max_seq_len)
        layouts = measured.layouts
        num_places = int((encoded.ids == self._family.image_token_id).sum())
        if num_places != len(layouts):
            raise BadSample(
                RejectReason.PLACEHOLDER_MISMATCH, f"{len(layouts)} images for {num_places} places in the text"
            )
        num_vision_tokens = sum(layout.num_tokens for layout in layouts)
        num_tokens = len(encoded.ids) - len(layouts) + num_vision_tokens
        is_oversized = num_tokens > self._config.max_seq_len
        if is_oversized and self._config.oversized == "reject":
            raise self._oversized(num_tokens, layouts)
        if num_vision_tokens > self._config.max_seq_len:
            raise self._oversized(num_tokens, layouts, ", and cutting its end would cut images")
        text = self._expand(encoded, layouts)
        num_cut = 0
        if is_oversized:
            text = self._cut(text, layouts)
            num_cut, num_tokens = num_tokens - text.shape[1], text.shape[1]
        parts = [PartSize(TEXT_PART, 1, 0, num_tokens, text.nbytes)]
        if layouts and self._keeps_images:
            parts.append(self._encoder_part(layouts))
        num_targets = _num_targets(text)
        sample = SizedSample(ref, num_tokens, num_vision_tokens, num_targets, tuple(parts), measured.image_nbytes)
        return SizedResult(sample, text, num_cut)

    def _check_text(self, turns: Sequence[Turn]) -> None:
        if len(turns) > self._config.max_seq_len:
            raise BadSample(
                RejectReason.OVERSIZED_SAMPLE,
                f"{len(turns)} turns need more tokens than data.max_seq_len ({self._config.max_seq_len})",
            )
        limit = self._config.text_limit_nbytes
        nbytes = sum(len(turn.text) for turn in turns)  # a character has one byte or more
        if nbytes <= limit:
            nbytes = sum(_utf8_nbytes(turn.text, number, len(turns)) for number, turn in enumerate(turns, start=1))
        if nbytes > limit:
            raise BadSample(
                RejectReason.OVERSIZED_SAMPLE,
                f"{nbytes} bytes of text or more are more than data.max_text_nbytes ({limit})",
            )

    def _cut(self, text: npt.NDArray[np.int32], layouts: Sequence[ImageLayout]) -> npt.NDArray[np.int32]:
        """Cut the text after ``max_seq_len`` tokens; raises BadSample if this would cut an image or leave no loss."""
        limit = self._config.max_seq_len
        kept = np.ascontiguousarray(text[:, :limit])
        num_lost = int((text[0, limit:] == self._family.image_token_id).sum())
        if num_lost:
            raise self._oversized(text.shape[1], layouts, f", and cutting its end would cut {num_lost} image tokens")
        if not _num_targets(kept):
            raise self._oversized(text.shape[1], layouts, ", and cutting its end would leave no token that bears loss")
        return kept

    def _oversized(self, num_tokens: int, layouts: Sequence[ImageLayout], why: str = "") -> BadSample:
        num_vision_tokens = sum(layout.num_tokens for layout in layouts)
        return BadSample(
            RejectReason.OVERSIZED_SAMPLE,
            f"{num_tokens} tokens ({num_vision_tokens} of them from {len(layouts)} images) are more than "
            f"data.max_seq_len ({self._config.max_seq_len}){why}",
        )

    def _read_images(self, images: Sequence[RawImage]) -> tuple[tuple[Buffer, ...], tuple[ImageLayout, ...]]:
        limit = self._config.max_image_nbytes
        read, layouts, nbytes = [], [], 0
        for number, image in enumerate(images, start=1):
            with errors_of_image(number, len(images), None if image.path is None else str(image.path)):
                data = image.read(limit)
                nbytes += len(data)
                if nbytes > limit:
                    raise BadSample(
                        RejectReason.OVERSIZED_SAMPLE,
                        f"{nbytes} bytes of encoded images up to this one are more than data.max_image_nbytes "
                        f"({limit})",
                    )
                layouts.append(self._layout(data))
                read.append(data)
        return tuple(read), tuple(layouts)

    def _layout(self, data: Buffer) -> ImageLayout:
        width, height = image_size(data, self._config.max_image_pixels)
        try:
            layout = self._family.image_layout(self._encoder, width, height)
        except ValueError as error:
            raise BadSample(RejectReason.CORRUPT_IMAGE, f"{width} x {height} pixels: {error}") from error
        if min(layout.num_patches, layout.num_rows, layout.num_tokens) < 1:
            raise BadSample(RejectReason.CORRUPT_IMAGE, f"{width} x {height} pixels are too small for a patch")
        return layout

    def _encoder_part(self, layouts: Sequence[ImageLayout]) -> PartSize:
        num_rows = sum(layout.num_rows for layout in layouts)
        return PartSize(
            name=self._encoder,
            num_items=sum(layout.num_tiles for layout in layouts),
            num_patches=sum(layout.num_patches for layout in layouts),
            num_rows=num_rows,
            nbytes=num_rows * self._family.row_nbytes(self._encoder),
        )

    def _expand(self, encoded: EncodedText, layouts: Sequence[ImageLayout]) -> npt.NDArray[np.int32]:
        """Repeat each image's token as often as it has vision tokens; int32 ``[2 or 5, num_tokens]``."""
        repeats = np.ones(len(encoded.ids), dtype=np.int64)
        repeats[encoded.ids == self._family.image_token_id] = [layout.num_tokens for layout in layouts]
        text = np.repeat(np.stack([encoded.ids, encoded.labels]), repeats, axis=1)
        grids = [layout.grid for layout in layouts if layout.grid is not None]
        if not grids:
            return text
        return np.concatenate([text, grid_positions(text[0] == self._family.image_token_id, grids)])


def _num_targets(text: npt.NDArray[np.int32]) -> int:
    """Tokens that carry loss after the shift by one."""
    return int((text[1, 1:] != IGNORE_LABEL).sum())


def _utf8_nbytes(text: str, number: int, count: int) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise BadSample(
            RejectReason.MALFORMED_SAMPLE,
            f"turn {number} of {count} has the lone surrogate {text[error.start]!r} at character {error.start}",
        ) from error
