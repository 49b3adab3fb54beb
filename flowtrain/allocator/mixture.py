"""A distribution of samples, as a model file gives it, and representative samples drawn from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from flowtrain.config.base import ConfigModel
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.errors import ConfigError

_MOST_DRAWS = 32
"""Samples drawn for each one that is wanted; too long ones are drawn again."""
_MOST_PATCHES = 1 << 24


class Spread(ConfigModel):
    """Whole numbers, lognormal by median and mean, as data sets publish them. Without ``mean`` all are the median."""

    median: float = Field(ge=1)
    mean: float | None = None
    least: int = Field(1, ge=0)
    """Smaller ones become this."""
    most: int = Field(1 << 24, ge=1)
    """Larger ones become this."""

    @model_validator(mode="after")
    def _is_lognormal(self) -> Spread:
        if self.mean is not None and self.mean < self.median:
            raise ValueError(
                f"mean ({self.mean:g}) is below median ({self.median:g}), which no lognormal distribution has; raise "
                "the mean, or leave it out if all are alike"
            )
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is above most ({self.most}); swap them")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Return ``count`` of them."""
        sigma = math.sqrt(2.0 * math.log((self.mean or self.median) / self.median))
        drawn = self.median * np.exp(sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.least, self.most).astype(np.int64)


class ImageKind(ConfigModel):
    """Images of one size: ``size`` in pixels, or the number of ``patches``."""

    size: tuple[int, int] | None = None
    """Width and height."""
    patches: int | None = Field(None, ge=1, le=_MOST_PATCHES)
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _has_one_size(self) -> ImageKind:
        if (self.size is None) == (self.patches is None):
            raise ValueError(f"give either size ({self.size}) or patches ({self.patches})")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size ({list(self.size)}) needs a width and a height of at least 1 pixel")
        return self

    def num_patches(self, side: int) -> int:
        """Return the patches of one image. side: pixels that a patch has along each side."""
        if self.size is None:
            assert self.patches is not None
            return self.patches
        width, height = (max(1, int(pixels / side + 0.5)) for pixels in self.size)
        return width * height


class Images(ConfigModel):
    """Images of a sample for one encoder."""

    count: Spread
    """Images of a sample."""
    patch_pixels: int | None = Field(None, ge=1)
    """Pixels of a patch along each side, after scaling; None: the encoder's ``patch_size``."""
    kinds: list[ImageKind] = Field(min_length=1)


class Component(ConfigModel):
    """Samples of one kind; images: by encoder."""

    weight: float = Field(1.0, gt=0)
    text_tokens: Spread
    images: dict[str, Images] = Field(default_factory=dict)


class Mixture(ConfigModel):
    """A distribution of samples."""

    components: list[Component] = Field(min_length=1)
    loss: Literal["text", "all"] = "text"
    """Tokens that carry loss."""
    num_samples: int = Field(2048, ge=1, le=1 << 20)
    """Representative samples to draw."""
    seed: int = Field(0, ge=0)

    def draw(
        self, most_tokens: int, patch_sizes: Mapping[str, int], patches_per_token: Mapping[str, int] | None = None
    ) -> tuple[IntArray, dict[str, Column]]:
        """Return the text tokens ``[S]`` of the representative samples, and their images by encoder.

        The same mixture gives the same samples. A sample longer than ``most_tokens`` is left out, as a run rejects one
        above ``data.max_seq_len``. patch_sizes: in pixels, by encoder. patches_per_token: by encoder; 1 for others.
        Raises ConfigError if hardly any sample is left.
        """
        rng, count = np.random.default_rng(self.seed), 2 * self.num_samples
        texts: list[IntArray] = []
        images: dict[str, list[IntArray]] = {name: [] for name in patch_sizes}
        left, drawn = self.num_samples, 0
        while left > 0:
            if drawn >= _MOST_DRAWS * self.num_samples:
                raise ConfigError(
                    f"workload.mixture: {self.num_samples - left} of {drawn} drawn samples have at most "
                    f"workload.microbatch_tokens ({most_tokens}) tokens; raise it, or lower text_tokens or images"
                )
            text, found = self._draw(rng, count, patch_sizes)
            kept = np.flatnonzero(text + image_tokens(found, patches_per_token or {}) <= most_tokens)[:left]
            texts.append(text[kept])
            for name, column in found.items():
                images[name].append(np.stack(column)[:, kept])
            left, drawn = left - len(kept), drawn + count
        columns = {name: np.concatenate(each, axis=1) for name, each in images.items()}
        return np.concatenate(texts), {name: (each[0], each[1]) for name, each in columns.items()}

    def _draw(
        self, rng: np.random.Generator, count: int, patch_sizes: Mapping[str, int]
    ) -> tuple[IntArray, dict[str, Column]]:
        """Draw samples of any length."""
        chosen = rng.choice(len(self.components), count, p=_shares([each.weight for each in self.components]))
        text = np.zeros(count, dtype=np.int64)
        images = {name: (np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)) for name in patch_sizes}
        for index, component in enumerate(self.components):
            places = np.flatnonzero(chosen == index)
            text[places] = component.text_tokens.draw(rng, len(places))
            for name, own in component.images.items():
                num_images, num_patches = images[name]
                num_images[places] = own.count.draw(rng, len(places))
                num_patches[places] = _patches(own, rng, num_images[places], patch_sizes[name])
        return text, images


Column = tuple[IntArray, IntArray]
"""Images and patches of each sample, ``[S]``."""


def image_tokens(images: Mapping[str, Column], patches_per_token: Mapping[str, int]) -> IntArray:
    """Return the tokens of all images of each sample, ``[S]``; images: by encoder, of at least one."""
    each = [patches // patches_per_token.get(name, 1) for name, (_, patches) in images.items()]
    return np.sum(each, axis=0, dtype=np.int64)


def _patches(images: Images, rng: np.random.Generator, num_images: IntArray, patch_size: int) -> IntArray:
    """Draw the patches of all images of each sample, ``[S]``."""
    side = images.patch_pixels if images.patch_pixels is not None else patch_size
    sizes = np.array([kind.num_patches(side) for kind in images.kinds], dtype=np.int64)
    kinds = rng.choice(len(sizes), int(num_images.sum()), p=_shares([kind.weight for kind in images.kinds]))
    sums = np.concatenate([[0], np.cumsum(sizes[kinds])])
    ends = np.cumsum(num_images)
    return np.diff(np.concatenate([[0], sums[ends]]))


def _shares(weights: list[float]) -> FloatArray:
    return np.array(weights) / sum(weights)
