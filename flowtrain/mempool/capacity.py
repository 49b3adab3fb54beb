"""Whether a pool can hold what a step needs at once, so that it cannot get stuck."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.errors import ConfigError


def check_capacity(segments: Sequence[int], largest_part_nbytes: int, parts_per_step: int, knob: str) -> None:
    """Check that the sum over segments of floor(segment / largest part) is at least the parts of a step.

    segments: bytes that each living owner gives to this kind of part. largest_part_nbytes: the most that one lease
    reserves, aligned; where a lease covers a batch, give the largest batch. parts_per_step: leases of a worst-case
    step. knob: configuration key that sizes a segment. Raises ConfigError with the numbers.
    """
    assert largest_part_nbytes > 0, largest_part_nbytes
    room = sum(segment // largest_part_nbytes for segment in segments)
    if room >= parts_per_step:
        return
    least = -(-parts_per_step // max(1, len(segments))) * largest_part_nbytes
    given = f"{len(segments)} segments of {sum(segments)} bytes in all" if segments else "no segment at all"
    raise ConfigError(
        f"the pool cannot hold one step, so the run could get stuck: a step has up to {parts_per_step} parts of up to "
        f"{largest_part_nbytes} bytes, and {given} hold {room}; raise {knob} to at least {least}, or lower "
        "training.global_batch_size or data.max_seq_len"
    )
