"""How large the segments of feeders must be: a worst-case step beside the images of the open blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.config.model import GRID_FAMILIES
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.flow.capacity import check_capacity
from flowtrain.types.sources import SourceIndex

KNOB = "pool.feeder_segment_nbytes"
_WAYS_OUT = "training.global_batch_size, data.max_seq_len, data.max_image_nbytes or data.shuffle_blocks"
_LEAST_NBYTES = 1 << 16
_MUCH_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FeederNeed:
    """What each feeder's segment must hold."""

    sample_nbytes: int
    """Text and encoded images of the largest sample, aligned."""
    samples: int
    """Samples of a worst-case step; all of them may belong to one feeder."""
    held_nbytes: int
    """Images of open blocks that wait for their turn."""
    other_nbytes: int = 0
    """What else of open blocks, as it is stored, waits in the process's own memory: mostly text."""

    @property
    def nbytes(self) -> int:
        """The least segment."""
        return max(_LEAST_NBYTES, self.held_nbytes + self.samples * self.sample_nbytes)

    @property
    def warning(self) -> str | None:
        """What to know about memory outside the segment; None if it is little."""
        if self.other_nbytes < _MUCH_NBYTES:
            return None
        return (
            f"a feeder's open blocks hold {self.other_nbytes} bytes of text, as stored, beside its segment: lower "
            "data.shuffle_blocks, raise data.num_feeders, or write the files with smaller row groups"
        )

    def check(self, segment_nbytes: int, max_segment_nbytes: int) -> None:
        """Raise ConfigError, with the numbers, if a segment is too small, or larger than the address space allows."""
        if segment_nbytes > max_segment_nbytes:
            raise ConfigError.of(
                KNOB,
                FaultCode.POOL,
                f"each feeder needs {segment_nbytes} bytes (up to {self.samples} samples of {self.sample_nbytes}, and "
                f"{self.held_nbytes} of open blocks), more than pool.max_segment_nbytes ({max_segment_nbytes}); lower "
                f"{_WAYS_OUT}, raise data.num_feeders, or raise pool.max_segment_nbytes",
            )
        check_capacity(
            [segment_nbytes],
            self.sample_nbytes,
            self.samples,
            KNOB,
            reserved_nbytes=self.held_nbytes,
            reserved_for="open blocks (data.shuffle_blocks)",
            ways_out=_WAYS_OUT,
        )


def feeder_need(config: RunConfig, indexes: Sequence[SourceIndex], num_eval: int, num_feeders: int) -> FeederNeed:
    """Return what each of ``num_feeders`` needs. indexes: of the training sources, at least."""
    batch_size, alignment = config.training.global_batch_size, config.pool.alignment
    samples = max(batch_size, num_eval)
    if config.data.order == "arrival":
        # The rest of a resumed run's first groups may be one position short of a step while feeders put another group.
        samples = max(samples, 2 * batch_size - 1)
    keeps_images = config.mode != "llm_only"  # there nobody reads them
    rows = 5 if config.model.family in GRID_FAMILIES else 2  # ids, labels, and positions of three axes
    text, images = rows * 4 * config.data.max_seq_len, config.data.max_image_nbytes if keeps_images else 0
    training = indexes[: len(config.data.sources)]
    held = sum(_held_nbytes(config, index, num_feeders) for index in training) if keeps_images else 0
    other = sum(
        _open_blocks(config, index, num_feeders) * int((index.block_nbytes - index.image_nbytes).max(initial=0))
        for index in training
    )
    return FeederNeed(_aligned(text, alignment) + _aligned(images, alignment), samples, held, max(0, other))


def _held_nbytes(config: RunConfig, index: SourceIndex, num_feeders: int) -> int:
    """Return the most bytes of one source that a feeder holds ahead of their turn."""
    return _open_blocks(config, index, num_feeders) * int(index.held_nbytes(config.pool.alignment).max())


def _open_blocks(config: RunConfig, index: SourceIndex, num_feeders: int) -> int:
    """Return the most blocks of one source that a feeder has open."""
    if config.data.shuffle == "rows":
        return 0
    lanes = min(config.data.shuffle_blocks, index.num_blocks) if config.data.shuffle == "blocks" else 1
    return -(-lanes // num_feeders)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
