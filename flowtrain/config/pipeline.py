"""How layers lie on pipeline ranks, and in which order these run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from flowtrain.config.base import MAX_DURATION_S, ConfigModel, meant
from flowtrain.errors import ConfigError, Fault, FaultCode
from flowtrain.types.run_plan import EncoderPlace

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig


PartitionMethod = Literal["uniform", "parameters", "profile", "balanced"]
_Layers = tuple[Annotated[int, Field(ge=0)], ...]
Policy = Literal["none", "balanced", "pipetune"]


class PipeTuneConfig(ConfigModel):
    """What ``policy: pipetune`` searches for each step, besides packing by the balance algorithm."""

    size: bool = True
    """The number of microbatches, by packing anew for each; otherwise as few as their capacity allows."""
    order: bool = True
    """The order of microbatches."""
    precompute: bool = True
    """Which images the first stage encodes ahead, while it waits for gradients. Only with ``mode: monolithic``,
    ``encoder_layers: first``, ``schedule: 1f1b`` and a frozen encoder."""
    arrival_limit_s: float = Field(0.2, ge=0, le=MAX_DURATION_S)
    """With ``data.order: arrival`` a step is planned when a rank asks for it. If its search takes longer than this, the
    step runs as ``policy: none`` plans it. In ``deterministic`` order a step always waits for its search."""


class PipelineConfig(ConfigModel):
    """The pipeline over ``backbone.pipeline_parallel_size`` ranks."""

    schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """``interleaved_1f1b`` gives each rank ``chunks`` slices of the layers."""
    chunks: int = Field(1, ge=1, le=4096)
    """Slices of the decoder layers on each rank."""
    partition: PartitionMethod | _Layers | None = None
    """Number of layers of each stage, in the order in which a microbatch passes them; None: balanced by the size of
    matrix products. With ``encoder_layers: mixed`` encoder layers count too and come first, otherwise only decoder
    layers do. A word chooses the numbers at the start (OmniBal 4.2). ``uniform``: as many layers each. ``parameters``:
    as many parameters each. ``profile``: the slowest stage as fast as can be, by each layer's time. ``balanced``:
    partitions close to that of ``profile``, ranked by time and transfers; the best are simulated."""
    encoder_layers: EncoderPlace = "first"
    """Where ``mode: monolithic`` has the encoder. ``first``: in the first stage. ``mixed``: encoder and decoder layers
    form one sequence, cut into stages of similar cost. ``own``: in stages of its own, on all ranks, which a microbatch
    passes before those of the backbone."""
    policy: Policy = "none"
    """How steps are planned (docs/scheduling.md). ``none``: by the ``scheduler`` section. ``balanced``: packed by the
    balance algorithm of PipeTune. ``pipetune``: as a search over simulated steps finds it best, which needs times of
    the devices: ``allocator.profile`` or ``backbone.accelerator_type``."""
    pipetune: PipeTuneConfig = PipeTuneConfig()

    @field_validator("partition", mode="before")
    @classmethod
    def _one_word_or_a_list(cls, value: Any) -> Any:
        """Name what is wrong; pydantic would name each of the two types."""
        key, words = "pipeline.partition", get_args(PartitionMethod)
        if value is None or (isinstance(value, str) and value in words):
            return value
        if not isinstance(value, list | tuple):
            said = f"{key} = {value!r}: must be one of {', '.join(words)}, or a list with each stage's number of layers"
            raise ConfigError.of(key, FaultCode.VALUE, said + meant(value, words))
        for stage, count in enumerate(value):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                said = f"{key}.{stage} = {count!r}: must be a number of layers, an integer from 0"
                raise ConfigError.of(key, FaultCode.VALUE, said)
        return tuple(value)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The numbers of layers of ``partition``, if it gives numbers."""
        return self.partition if isinstance(self.partition, tuple) else None


def schedule_has_its_chunks(config: RunConfig) -> Iterator[Fault]:
    """Refuse a schedule and a number of chunks that do not belong together."""
    schedule, chunks = config.pipeline.schedule, config.pipeline.chunks
    if schedule == "interleaved_1f1b" and chunks < 2:
        yield Fault(
            "pipeline.chunks",
            FaultCode.CONFLICT,
            f"pipeline.schedule ({schedule!r}) needs pipeline.chunks ({chunks}) of at least 2; raise it, or set the "
            "schedule to '1f1b'",
        )
    if schedule == "1f1b" and chunks > 1:
        yield Fault(
            "pipeline.chunks",
            FaultCode.CONFLICT,
            f"pipeline.chunks ({chunks}) above 1 needs pipeline.schedule 'interleaved_1f1b' (now {schedule!r}); set "
            "that, or set chunks to 1",
        )


def partition_has_its_stages(config: RunConfig) -> Iterator[Fault]:
    """Refuse a partition with another number of stages; whether its layers add up is seen with the model."""
    pipeline, pp_size = config.pipeline, config.backbone.pipeline_parallel_size
    counts = pipeline.counts
    if counts is not None and len(counts) != pp_size * pipeline.chunks:
        yield Fault(
            "pipeline.partition",
            FaultCode.CONFLICT,
            f"pipeline.partition has {len(counts)} entries and the pipeline has "
            f"{pp_size * pipeline.chunks} stages: backbone.pipeline_parallel_size ({pp_size}) times pipeline.chunks "
            f"({pipeline.chunks}); give one number of layers for each stage",
        )
