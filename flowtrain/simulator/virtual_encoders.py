"""Encoders of a simulated run: they lease batches as the actors do, and decode and forward in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from flowtrain.flow.leases import pending_nbytes
from flowtrain.flow.records import BatchKey
from flowtrain.mempool.gva import AddressSpace
from flowtrain.simulator.producers import PER_NODE, LostWork, Producer
from flowtrain.simulator.samples import DrawnSamples
from flowtrain.simulator.virtual import Occupancy, VirtualFlow
from flowtrain.types.messages import EncoderReport, Lease, PartReady
from flowtrain.types.plan import EncodeBatch


@dataclass(frozen=True, slots=True)
class EncoderGroup:
    """The replicas of one encoder."""

    name: str
    count: int
    decode_s: Sequence[float]
    """Seconds in which a replica's threads decode the images of each kind of sample, beside the forward."""
    forward_s: Sequence[float]
    """Seconds of a replica's forward over the images of each kind of sample."""
    segment_nbytes: int
    """Of each replica."""


@dataclass(slots=True)
class _Job:
    """A leased batch."""

    lease: Lease
    kinds: list[int]
    """Of the samples of its batch."""
    leased_s: float
    begun_s: float = 0.0
    """Start of its forward."""


class EncoderLine:
    """The replicas of one encoder; those that wait for a lease ask in the order in which they began to wait.

    spread: standard deviation of a forward's time over its mean; forwards are then drawn from a lognormal distribution.
    seed: of these draws.
    """

    def __init__(
        self,
        run: VirtualFlow,
        group: EncoderGroup,
        samples: DrawnSamples,
        space: AddressSpace,
        occupancy: Occupancy,
        lost: LostWork,
        *,
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.run = run
        self.group = group
        self.samples = samples
        self.occupancy = occupancy
        self.lost = lost
        self.blocked_s = 0.0
        """Seconds that replicas had nothing leased, in all."""
        self._decoding_s = self._forwarding_s = 0.0
        self._forwarded: set[BatchKey] = set()
        self._variance = math.log1p(spread**2)
        self._random = Random(seed)
        self._waiting: dict[VirtualEncoder, None] = {}
        self._feature_nbytes = [
            sum(part.nbytes for part in kind.parts if part.name == group.name) for kind in samples.kinds
        ]
        self.encoders = [VirtualEncoder(self, number, space) for number in range(group.count)]

    @property
    def busy_s(self) -> float:
        """Seconds that replicas worked, in all; they decode beside forwards, and the longer of both counts."""
        return max(self._decoding_s, self._forwarding_s)

    def wait(self, encoder: VirtualEncoder) -> None:
        """Note that a replica waits for a lease."""
        self._waiting.setdefault(encoder)

    def leave(self, encoder: VirtualEncoder) -> None:
        """Note that a replica waits no longer."""
        self._waiting.pop(encoder, None)

    def wake(self) -> None:
        """Let waiting replicas ask for leases that they may get."""
        leases, name = self.run.flow.parts.leases, self.group.name
        known, needed = None, 0
        for encoder in tuple(self._waiting) if leases.first_in_line(name) is not None else ():
            first = leases.first_in_line(name)
            if first is None or first.num_unfed:
                return
            if first is not known:
                known, needed = first, pending_nbytes(first)
            if encoder.room_nbytes >= needed:
                encoder.ask()

    def forward_s(self, kinds: Sequence[int]) -> float:
        """Return seconds of the forward of a batch of these kinds of samples, the spread included."""
        each = self.group.forward_s
        seconds = sum([each[kind] for kind in kinds])
        if not self._variance:
            return seconds
        return seconds * self._random.lognormvariate(-self._variance / 2, math.sqrt(self._variance))

    def decode_s(self, kinds: Sequence[int]) -> float:
        """Return seconds in which a batch of these kinds of samples is decoded."""
        each = self.group.decode_s
        return sum([each[kind] for kind in kinds])

    def feature_nbytes(self, job: _Job) -> list[int]:
        """Return the bytes of the features at each needed position of a lease."""
        each, lease = self._feature_nbytes, job.lease
        is_whole = lease.needed is lease.batch.positions
        kinds = job.kinds if is_whole else self.samples.kinds_of(lease.needed)
        return [each[kind] for kind in kinds]

    def note_decoded(self, seconds: float) -> None:
        """Note a decoded batch."""
        self._decoding_s += seconds

    def note_forwarded(self, batch: EncodeBatch, seconds: float) -> None:
        """Note a finished forward; one that was done before is lost work."""
        self._forwarding_s += seconds
        key = batch.unit, batch.index
        if key in self._forwarded:
            self.lost.encode_s += seconds
        self._forwarded.add(key)


class VirtualEncoder(Producer):
    """Decodes one batch while it forwards another; it asks for a lease when a forward begins, as the actor does."""

    def __init__(self, line: EncoderLine, number: int, space: AddressSpace) -> None:
        name = line.group.name
        super().__init__(line.run, f"{name}-{number}", f"{name}-{number // PER_NODE}", space)
        self._line = line
        self._decoded: _Job | None = None
        self._forwarding: _Job | None = None
        self._idle_since_s = 0.0

    def start(self) -> None:
        """See ``Producer``."""
        self._join(self._line.group.segment_nbytes, self._line.occupancy)
        self._idle_since_s = self._run.now_s
        self._line.wait(self)

    def lose(self, down_s: float) -> None:
        """See ``Producer``."""
        if self._forwarding is not None:
            self._line.lost.encode_s += self._run.now_s - self._forwarding.begun_s
        self._decoded = self._forwarding = None
        self._line.leave(self)
        super().lose(down_s)

    @property
    def room_nbytes(self) -> int:
        """Free bytes of its segment, with those that it may free."""
        return self._segment.free_nbytes + self._run.flow.parts.holdings.released_nbytes(self._index)

    def ask(self) -> None:
        """Ask for a lease, or wait for one."""
        run = self._run
        order = run.flow.lease_order(self._index, self._line.group.name, self._segment.free_nbytes)
        if order is None:
            self._line.wait(self)
            return
        self._segment.free(run.aligned(order.released))
        self._line.leave(self)
        if order.lease is None:
            return  # the run is over
        self._segment.take(order.lease.nbytes)
        kinds = self._line.samples.kinds_of(order.lease.batch.positions)
        job = _Job(order.lease, kinds, run.now_s)
        run.at(run.now_s + self._line.decode_s(kinds), partial(self._has_decoded, job, self._life))

    def _has_decoded(self, job: _Job, life: int) -> None:
        if self._is_alive(life):
            self._line.note_decoded(self._run.now_s - job.leased_s)
            self._decoded = job
            self._forward()

    def _forward(self) -> None:
        job = self._decoded
        if job is None or self._forwarding is not None:
            return
        run = self._run
        self._line.blocked_s += max(0.0, job.leased_s - self._idle_since_s)
        self._decoded, self._forwarding = None, job
        job.begun_s = run.now_s
        run.at(run.now_s + self._line.forward_s(job.kinds), partial(self._has_forwarded, job, self._life))
        if run.flow.parts.leases.first_in_line(self._line.group.name) is not None:
            self.ask()
        else:
            self._line.wait(self)

    def _has_forwarded(self, job: _Job, life: int) -> None:
        if not self._is_alive(life):
            return
        run, lease, name = self._run, job.lease, self._line.group.name
        self._line.note_forwarded(lease.batch, run.now_s - job.begun_s)
        extents, sizes = self._segment.extents, self._line.feature_nbytes(job)
        ready = tuple(
            [
                PartReady(position, name, lease.epoch, extents(nbytes))
                for position, nbytes in zip(lease.needed, sizes, strict=True)
            ]
        )
        refused = run.flow.hand_in(self._index, EncoderReport(ready, lease_id=lease.lease_id))
        self._segment.free(run.aligned(refused))
        self._note_ready(lease.needed, is_late=bool(refused))
        self._forwarding, self._idle_since_s = None, run.now_s
        self._forward()

    def _note_ready(self, positions: Sequence[int], is_late: bool) -> None:
        run, parts = self._run, self._run.flow.parts
        for position in positions:
            if is_late and parts.is_consumed(position):
                continue  # the lease had expired
            microbatch = parts[position].microbatch
            if microbatch is None:
                run.may_plan = True  # in arrival order a step is planned from what is ready
            elif not microbatch.missing:
                run.ready_ranks.add(microbatch.dp_rank)
        run.has_room = True  # images that only this lease has kept are free
