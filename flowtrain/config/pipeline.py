"""How layers lie on pipeline ranks, and in which order these run them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flowtrain.config.base import ConfigModel

EncoderPlace = Literal["first", "mixed", "own"]


class PipelineConfig(ConfigModel):
    """The pipeline over ``backbone.pipeline_parallel_size`` ranks."""

    schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """``interleaved_1f1b`` gives each rank ``chunks`` slices of the layers."""
    chunks: int = Field(1, ge=1)
    """Slices of the decoder layers on each rank."""
    partition: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Number of layers of each stage, in the order in which a microbatch passes them; None: balanced. With
    ``encoder_layers: mixed`` encoder layers count too and come first, otherwise only decoder layers do."""
    encoder_layers: EncoderPlace = "first"
    """Where ``mode: monolithic`` has the encoder. ``first``: in the first stage. ``mixed``: encoder and decoder layers
    form one sequence, cut into stages of similar cost. ``own``: in stages of its own, on all ranks, which a microbatch
    passes before those of the backbone."""
