"""What a pipeline of encoder stages asks of any family's vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from flowtrain.pipeline.actions import StageMemory

ImageSize = tuple[int, int]
"""Height and width in pixels."""


class EncoderShape(ABC):
    """What images become in a tower, known without its weights."""

    @abstractmethod
    def num_patches(self, size: ImageSize) -> int:
        """Return the patches of an image."""

    @abstractmethod
    def num_tokens(self, size: ImageSize) -> int:
        """Return the tokens of an image in the tower's layers."""

    @abstractmethod
    def num_rows(self, size: ImageSize) -> int:
        """Return the feature rows of an image."""

    @property
    @abstractmethod
    def feature_width(self) -> int:
        """Width of a feature row."""

    @abstractmethod
    def width_after(self, num_layers: int) -> int:
        """Return the width of what a stage hands on, for each token, if so many layers are done."""


class EncoderStage(nn.Module):
    """A vision tower up to its features, or a pipeline stage of it; the first has the embedding, the last one selects.

    Parameters keep their names in HF's class, after ``tower.``. A stage that is not trained requires no gradients and
    is always in evaluation mode.
    """

    is_first = True
    """Whether images enter here."""
    is_last = True
    """Whether features come out here."""
    is_trained = False
    token_mesh: DeviceMesh | None = None
    """The ranks that split hidden states inside a stage by tokens (sequence parallelism); None: each has all."""
    shape: EncoderShape
    tower: PreTrainedModel

    @property
    def layers(self) -> list[nn.Module]:
        """Its layers in order."""
        raise NotImplementedError

    def take(self, layers: range, *, is_first: bool, is_last: bool) -> Self:
        """Return the stage that holds these layers, sharing its modules."""
        raise NotImplementedError

    def forward(
        self, inputs: Sequence[Tensor] | Tensor, sizes: Sequence[ImageSize], memory: StageMemory | None = None
    ) -> Tensor:
        """Run images through the stage.

        inputs: of the first stage the images, ``[C, H, W]`` each, in any float type; else what the stage before
        returned. sizes: of all images. memory: what layers keep for the backward pass.

        Returns ``[tokens of all images, width]``, the last stage feature rows ``[rows of all images, row width]``. Each
        layer is called once, so that ranks with other images have the same collectives; without images it runs on a
        blank one, whose rows are left out.
        """
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """See ``nn.Module``; a frozen stage stays in evaluation mode."""
        return super().train(mode and self.is_trained)
