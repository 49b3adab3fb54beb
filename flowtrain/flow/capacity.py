"""Whether a pool can hold what a step needs at once, so that it cannot get stuck."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.errors import ConfigError, FaultCode


def check_capacity(segments: Sequence[int], largest_part_nbytes: int, parts_per_step: int, knob: str) -> None:
    """Check that the sum over segments of floor(segment / largest part) is at least the parts of a step.

    segments: bytes that each living owner gives to this kind of part. largest_part_nbytes: the most that one lease
    reserves, aligned; where a lease covers a batch, give the largest batch. parts_per_step: leases of a worst-case
    step. knob: configuration key that sizes a segment. Raises ConfigError with the numbers, also where not even one
    sample fits a segment.
    """
    assert largest_part_nbytes > 0, largest_part_nbytes
    room = sum(segment // largest_part_nbytes for segment in segments)
    if room >= parts_per_step:
        return
    least = -(-parts_per_step // max(1, len(segments))) * largest_part_nbytes
    if segments and not room:
        raise ConfigError.of(
            knob,
            FaultCode.POOL,
            f"no segment can hold one sample: the largest has {max(segments)} bytes, and a sample of data.max_seq_len "
            f"tokens, with the batch that it is encoded in, takes up to {largest_part_nbytes}; raise {knob} to at "
            f"least {least}, which holds a step of {parts_per_step} such parts, or lower data.max_seq_len",
        )
    given = f"{len(segments)} segments of {sum(segments)} bytes in all" if segments else "no segment at all"
    raise ConfigError.of(
        knob,
        FaultCode.POOL,
        f"the pool cannot hold one step, so the run could get stuck: a step has up to {parts_per_step} parts of up to "
        f"{largest_part_nbytes} bytes, and {given} hold {room}; raise {knob} to at least {least}, or lower "
        "training.global_batch_size or data.max_seq_len",
    )


def check_scattered_capacity(segments: Sequence[int], largest_lease_nbytes: int, held_nbytes: int, knob: str) -> None:
    """Check that the largest lease still fits somewhere while ``held_nbytes`` lie in the worst way over the segments.

    For ``data.order: arrival``, where a step's positions come from more leases than in order, most of whose other
    positions ran before. Why it suffices, for an encoder's segments: let the backbone wait for step k, the first that
    is not done, of B positions. Leases go in order, so when no encoder has room for the first batch in line, what lies
    in the segments are earlier positions.

    - Step k is not planned. The groups up to k have at least B positions left. Were they all leased, they would all be
      ready in the end, and k planned; so the batch is of one of them, and fewer than B positions lie before it.
    - Step k is planned and waits for positions whose last step it is. The batch is of one of them or of earlier ones,
      and so what lies before it is of step k too: fewer than B positions again.
    - A round of evaluation closes the window, so only its own positions can lie before one of its batches; it needs no
      more than in order, which ``check_capacity`` checks.

    With held_nbytes for B - 1 positions, some segment then has room for the batch. Arguments as of ``check_capacity``.
    Raises ConfigError with the numbers.
    """
    room = sum(max(0, segment - largest_lease_nbytes) for segment in segments)
    if room >= held_nbytes:
        return
    least = largest_lease_nbytes - (-held_nbytes // max(1, len(segments)))
    raise ConfigError.of(
        knob,
        FaultCode.POOL,
        f"the pool cannot hold one step in arrival order, so the run could get stuck: beside {held_nbytes} bytes that "
        f"a step may wait with, {len(segments)} segments of {sum(segments)} bytes in all have no room for a lease of "
        f"{largest_lease_nbytes} bytes; raise {knob} to at least {least}, lower training.global_batch_size or "
        "data.max_seq_len, or set data.order to deterministic",
    )
