"""Checks that a pool can hold everything that one step needs at once, so that a run cannot get stuck."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.errors import ConfigError, FaultCode


def check_capacity(
    segments: Sequence[int],
    largest_part_nbytes: int,
    parts_per_step: int,
    knob: str,
    *,
    reserved_nbytes: int = 0,
    reserved_for: str = "",
    ways_out: str = "training.global_batch_size or data.max_seq_len",
) -> None:
    """Check that the sum over segments of floor(segment / largest part) is at least the parts of a step.

    segments: bytes that each living owner gives to this kind of part.
    largest_part_nbytes: the most that one lease reserves, aligned; for leases of batches, the largest batch.
    parts_per_step: leases of a worst-case step.
    knob: configuration key that sets the size of a segment.
    reserved_nbytes, reserved_for: bytes of each segment that other things take, and which; they come on top.
    ways_out: keys that can be lowered instead.

    Raises ConfigError with the numbers, also when not even one sample fits into a segment.
    """
    assert largest_part_nbytes > 0, largest_part_nbytes
    room = sum(max(0, segment - reserved_nbytes) // largest_part_nbytes for segment in segments)
    if room >= parts_per_step:
        return
    least = reserved_nbytes + -(-parts_per_step // max(1, len(segments))) * largest_part_nbytes
    beside = f" beside {reserved_nbytes} bytes of {reserved_for}" if reserved_nbytes else ""
    if segments and not room and not reserved_nbytes:
        raise ConfigError.of(
            knob,
            FaultCode.POOL,
            f"no segment can hold one sample: the largest has {max(segments)} bytes, and a sample of data.max_seq_len "
            f"tokens, with the batch that it is encoded in, takes up to {largest_part_nbytes}; raise {knob} to at "
            f"least {least}, which holds a step of {parts_per_step} such parts{beside}, or lower {ways_out}",
        )
    given = f"{len(segments)} segments of {sum(segments)} bytes in all" if segments else "no segment at all"
    raise ConfigError.of(
        knob,
        FaultCode.POOL,
        f"the pool cannot hold one step, so the run could get stuck: a step has up to {parts_per_step} parts of up to "
        f"{largest_part_nbytes} bytes, and {given} hold {room}{beside}; raise {knob} to at least {least}, or lower "
        f"{ways_out}",
    )


def check_scattered_capacity(segments: Sequence[int], largest_lease_nbytes: int, held_nbytes: int, knob: str) -> None:
    """Check that the largest lease still fits into a segment while ``held_nbytes`` are spread in the worst way.

    For ``data.order: arrival``: there a step's positions come from more leases than in ``deterministic`` order, and
    most other positions of these leases ran before.

    The check suffices for an encoder's segments. Let k be the first step that is not done, and B its number of
    positions; the backbone waits for k. Leases are granted in order. So when no encoder has room for the first batch
    in line, the segments hold earlier positions only.

    - Step k is not planned. The groups up to k have at least B positions left. If all these were leased, all would
      become READY and k would be planned. So the batch belongs to one of these groups, and fewer than B positions lie
      before it.
    - Step k is planned and waits for positions whose last step is k. The batch holds one of these or earlier ones. So
      the positions before it belong to step k too: again fewer than B.
    - An evaluation round closes the window, so only its own positions can lie before one of its batches. It needs no
      more than in ``deterministic`` order, which ``check_capacity`` checks.

    With held_nbytes for B - 1 positions, at least one segment has room for the batch.

    segments, knob: as of ``check_capacity``.
    largest_lease_nbytes: the most that one lease reserves, aligned.
    held_nbytes: bytes that the segments may hold while a step waits.

    Raises ConfigError with the numbers.
    """
    room = sum(max(0, segment - largest_lease_nbytes) for segment in segments)
    if room >= held_nbytes:
        return
    least = largest_lease_nbytes - (-held_nbytes // max(1, len(segments)))
    raise ConfigError.of(
        knob,
        FaultCode.POOL,
        f"the pool cannot hold one step in arrival order, so the run could get stuck: while a step waits with "
        f"{held_nbytes} bytes, {len(segments)} segments of {sum(segments)} bytes in all have no room for a lease of "
        f"{largest_lease_nbytes} bytes; raise {knob} to at least {least}, lower training.global_batch_size or "
        "data.max_seq_len, or set data.order to deterministic",
    )
