"""A step plan as the directory's records, checked against the sizes that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

from flowtrain.errors import PoolError
from flowtrain.mempool.directory_records import BatchRecord, MicrobatchRecord, PositionRecord, UnitRecord
from flowtrain.types.plan import EncodeBatch, StepPlan
from flowtrain.types.samples import TEXT_PART

Known = Callable[[int], PositionRecord]


def build_unit(plan: StepPlan, known: Known, aligned: Callable[[int], int]) -> tuple[UnitRecord, list[BatchRecord]]:
    """Return the records of a plan and of its encode batches, and tie its positions to their microbatches.

    known: record of a position, or PoolError. aligned: bytes that a part takes. Raises PoolError unless every position
    of the unit is planned once or rejected, and every part from an encoder is in the plan's batches or in earlier ones.
    """
    unit = UnitRecord(plan.unit, plan.dp_size)
    for slot, rank in product(range(plan.num_slots), range(plan.dp_size)):
        positions = plan.microbatch_positions(slot, rank)
        unit.microbatches[slot, rank] = _microbatch_record(unit, slot, rank, positions, known)
    for position in plan.unit.positions:
        record = known(position)
        if record.microbatch is None and not record.rejected:
            raise PoolError(f"unit {plan.unit.index} leaves out its position {position}, which was not rejected")
    unit.unreleased = len(unit.microbatches)
    batches = [batch_record(batch, known, aligned) for batch in plan.encode_batches]
    num_planned = sum(_num_unbatched(record.positions) for record in unit.microbatches.values())
    num_batched = sum(len(batch.parts) for batch in batches)
    if num_batched != num_planned:
        raise PoolError(
            f"unit {plan.unit.index}: its samples need {num_planned} parts from encoders, its encode batches make "
            f"{num_batched}"
        )
    return unit, batches


def _num_unbatched(positions: Iterable[PositionRecord]) -> int:
    return sum(
        part.batch is None for position in positions for part in position.parts.values() if part.name != TEXT_PART
    )


def _microbatch_record(
    unit: UnitRecord, slot: int, dp_rank: int, positions: Iterable[int], known: Known
) -> MicrobatchRecord:
    record = MicrobatchRecord(unit, slot, dp_rank)
    for number in positions:
        position = known(number)
        if position.microbatch is not None:
            raise PoolError(f"position {number} was planned twice; every position runs once")
        position.microbatch = record
        record.positions.append(position)
        record.missing += position.missing > 0 and not position.rejected
    if not record.missing:
        unit.ready[record.dp_rank].add(record.slot)
    return record


def batch_record(batch: EncodeBatch, known: Known, aligned: Callable[[int], int]) -> BatchRecord:
    """Return the record of an encode batch; raises PoolError where its parts take other bytes than it says."""
    record = BatchRecord(batch, {position: known(position).parts[batch.encoder] for position in batch.positions})
    nbytes = sum(aligned(part.nbytes) for part in record.parts.values())
    if nbytes != batch.nbytes:
        raise PoolError(
            f"unit {batch.unit}, encode batch {batch.index} was planned with {batch.nbytes} bytes; its parts take "
            f"{nbytes} when aligned (pool.alignment)"
        )
    return record
