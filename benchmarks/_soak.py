"""The soak's own process: the flow and two ranks that check every byte, while producers are killed.

It answers the producers as the coordinator does; the flow, the planner and the pool are the real ones.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
import uuid
import zlib
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from _soak_producers import (
    ALIGNMENT,
    MAX_ENCODED_NBYTES,
    MAX_PATCHES,
    NODE,
    NUM_FEEDERS,
    PATCH_NBYTES,
    VISION,
    Encoder,
    Feeder,
    Place,
    payload,
    produce,
    sample_of,
)
from _soak_world import (
    DP_SIZE,
    MAX_PROCESSES,
    NUM_ENCODERS,
    POOL_SHARE,
    Rank,
    Result,
    Worker,
    WrongResult,
    holders,
    make_flow,
    report,
    sums,
)

from flowtrain.errors import OwnerLostError
from flowtrain.flow.capacity import check_capacity
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.events import UnitDone
from flowtrain.types.memory import Extent, PoolStats
from flowtrain.types.messages import FeedOrder, MicrobatchLocation

STALL_S, END_S, KILL_DELAY_S = 60.0, 20.0, 0.03
AIMED_EVERY = 4
"""One of this many kills hits an owner whose memory is about to be read; the others hit any producer at any moment."""
FEEDERS = tuple(f"feeder-{number}" for number in range(NUM_FEEDERS))
MAX_TEXT_NBYTES = 4096


class Soak:
    """One run over ``num_samples`` positions with about ``num_kills`` SIGKILLs; ``run`` does it once."""

    def __init__(self, num_samples: int, num_kills: int, seed: int) -> None:
        self._num_samples = num_samples
        self._draw = random.Random(seed)
        batch = max(8, num_samples // 1000)
        features, fed = sums(num_samples)
        shares = features // (POOL_SHARE * NUM_ENCODERS), fed // (POOL_SHARE * NUM_FEEDERS)
        segment, feeder_segment = (nbytes - nbytes % ALIGNMENT for nbytes in shares)
        self._segments = dict.fromkeys(FEEDERS, feeder_segment)
        self._segments |= {f"encoder-{number}": segment for number in range(NUM_ENCODERS)}
        largest = MAX_PATCHES * (PATCH_NBYTES + ALIGNMENT)
        check_capacity([segment] * NUM_ENCODERS, largest, batch, "--samples")
        check_capacity([feeder_segment], MAX_TEXT_NBYTES + MAX_ENCODED_NBYTES, batch, "--samples")
        self._space = AddressSpace(MAX_PROCESSES, 1 << max(segment, feeder_segment).bit_length())
        self._run_id = uuid.uuid4().hex[:12]
        self._flow = make_flow(num_samples, batch, self._space)
        self._result = Result(features + fed, sum(self._segments.values()))
        self._workers: dict[str, Worker] = {}
        index = self._flow.join("reader", NODE).process_index
        self._open_pool = partial(
            Pool, index, NODE, self._run_id, self._space, 0, ALIGNMENT, "no segment", self._flow.members.exports
        )
        self._ranks = [Rank(number, self._open_pool()) for number in range(DP_SIZE)]
        self._seen = bytearray(num_samples)
        # A few more, since some hit a process that is already dead.
        ends = sorted(self._draw.uniform(0.01, 0.97) for _ in range(num_kills + num_kills // 5 + 2))
        self._kills_due = [int(end * num_samples) for end in ends]
        self._timers: list[threading.Timer] = []
        self._leased: set[int] = set()
        self._context = multiprocessing.get_context("forkserver")
        # So that a restarted producer is ready in milliseconds.
        self._context.set_forkserver_preload(["flowtrain.mempool.pool", "flowtrain.flow.flow"])

    def run(self) -> Result:
        """Produce, kill and check until every position is consumed. Raises WrongResult."""
        started = time.monotonic()
        try:
            for name in self._segments:
                self._start(name)
            self._until_done()
            self._check_end()
        finally:
            for timer in self._timers:
                timer.cancel()
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.join(END_S)
            for rank in self._ranks:
                rank.pool.close()
        self._check_nothing_is_left()
        self._result.duration_s = time.monotonic() - started
        return self._result

    def _until_done(self) -> None:
        progress_s = time.monotonic()
        while not all(rank.stopped for rank in self._ranks) or not all(w.ended for w in self._workers.values()):
            moved = [self._move(rank) for rank in self._ranks]
            moved.append(self._pump(0.0 if any(moved) else 0.002))
            moved += [self._answer(worker) for worker in self._workers.values()]
            self._kill_when_due()
            if any(moved):
                progress_s = time.monotonic()
            elif time.monotonic() - progress_s > STALL_S:
                waits = "; ".join(self._flow.describe_wait(r.unit, r.slot, r.number) for r in self._ranks)
                raise WrongResult(f"nothing happened for {STALL_S:g} s: {waits}")

    # --- producers ----------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        feeder = FEEDERS.index(name) if name in FEEDERS else None
        index = self._flow.join(name, NODE, feeder).process_index
        place = Place(self._run_id, self._space, index, self._segments[name], feeder)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=produce, args=(Encoder if feeder is None else Feeder, place, theirs))
        process.start()
        theirs.close()
        self._workers[name] = Worker(name, index, process, ours)

    def _pump(self, timeout_s: float) -> bool:
        """Handle the producers' messages."""
        workers = {worker.connection: worker for worker in self._workers.values() if not worker.ended}
        ready = wait(list(workers), timeout_s)
        for connection in ready:
            worker = workers[connection]
            try:
                method, args = worker.connection.recv()
            except (EOFError, OSError):
                self._died(worker)
            else:
                self._take(worker, method, args)
        return bool(ready)

    def _died(self, worker: Worker) -> None:
        worker.process.join(END_S)
        if worker.process.exitcode != -signal.SIGKILL:
            raise WrongResult(f"{worker.name} ended with {worker.process.exitcode}, but the soak did not kill it")
        self._result.num_kills += 1
        worker.connection.close()
        self._flow.process_lost(worker.name)
        self._start(worker.name)

    def _take(self, worker: Worker, method: str, args: tuple[Any, ...]) -> None:
        flow, index = self._flow, worker.index
        if method == "failed":
            raise WrongResult(f"{worker.name}: {args[0]}")
        if method == "publish":
            flow.members.publish(args[0])
            self._send(worker, None)
        elif method == "exports":
            self._send(worker, flow.members.exports())
        elif method == "hand_in":
            if args[0].returned is None:
                self._note(args[0].stats)
            else:
                self._result.num_lost_reads += 1
            self._send(worker, flow.hand_in(index, args[0]))
        elif method == "lease":
            worker.waiting = lambda: self._lease_order(index, args[0])
        elif method == "feed":
            if args[0].stats is not None:
                self._note(args[0].stats)
            refused = flow.feed(index, args[0])
            worker.waiting = lambda: self._feed_order(index, refused)
        elif method == "released":
            self._result.num_full += 1
            worker.waiting = lambda: flow.room_order(index)
        else:
            assert method == "ended", method
            self._take_end(worker, args[0])

    def _lease_order(self, index: int, free_nbytes: int) -> object | None:
        order = self._flow.lease_order(index, VISION, free_nbytes)
        if order is not None and order.lease is not None:
            self._result.num_remade += len(self._leased.intersection(order.lease.needed))
            self._leased.update(order.lease.needed)
        return order

    def _feed_order(self, index: int, refused: tuple[Extent, ...]) -> FeedOrder | None:
        order = self._flow.feed_order(index)
        if order is None and refused:
            return FeedOrder(None, (), refused, stop=False)
        if order is not None:
            self._result.num_remade += sum(len(lost.parts) for lost in order.remake)
            order = replace(order, released=refused + order.released)
        return order

    def _answer(self, worker: Worker) -> bool:
        answer = worker.waiting() if worker.waiting is not None else None
        if answer is None:
            return False
        worker.waiting = None
        self._send(worker, answer)
        return True

    def _send(self, worker: Worker, answer: object) -> None:
        try:
            worker.connection.send(answer)
        except OSError:
            return  # killed meanwhile; the next look at its pipe shows that

    def _note(self, stats: PoolStats) -> None:
        self._result.num_balances += 1
        if stats.free_nbytes + stats.used_nbytes != stats.bound_nbytes:
            raise WrongResult(f"free plus used bytes are not the bound bytes: {stats}")
        if stats.free_nbytes > stats.bound_nbytes // 10:  # with less, two small runs would count as much
            self._result.fragmentation.append(1 - stats.largest_free_nbytes / stats.free_nbytes)

    def _take_end(self, worker: Worker, stats: PoolStats) -> None:
        if stats.used_nbytes or stats.largest_free_nbytes != stats.bound_nbytes:
            raise WrongResult(f"{worker.name} ends with memory that is not one free run: {stats}")
        worker.ended = True
        self._send(worker, None)
        worker.process.join(END_S)

    def _kill_when_due(self) -> None:
        while self._kills_due and self._result.num_consumed >= self._kills_due[0]:
            owner = self._told_to_read()
            if len(self._kills_due) % AIMED_EVERY == 0:
                if owner is None:
                    return
                self._kills_due.pop(0)
                owner.process.kill()
                owner.process.join(END_S)
                continue
            self._kills_due.pop(0)
            worker = self._workers[self._draw.choice(sorted(self._workers))]
            timer = threading.Timer(self._draw.uniform(0, KILL_DELAY_S), worker.process.kill)
            self._timers.append(timer)
            timer.start()

    def _told_to_read(self) -> Worker | None:
        """The owner of what some rank will read next, if a rank has got a location."""
        indices = {worker.index: worker for worker in self._workers.values() if not worker.ended}
        for rank in self._ranks:
            for part in rank.located.parts if rank.located is not None else ():
                owner = indices.get(self._space.translate(part.extents[0].gva).process_index)
                if owner is not None:
                    return owner
        return None

    # --- the backbone -------------------------------------------------------------------------------------------

    def _move(self, rank: Rank) -> bool:
        """Do a rank's next action; returns whether there was one."""
        flow = self._flow
        if rank.stopped or (not rank.running and rank.unit > min(other.unit for other in self._ranks)):
            return False
        if not rank.running:
            rank.running = flow.steps.begin(rank.unit)
            rank.stopped = not rank.running
            return True
        plan = flow.plan_of(rank.unit)
        if plan is None:
            return False
        if rank.located is not None:
            self._read(rank, rank.located, plan.microbatch_positions(rank.slot, rank.number))
        elif rank.slot < plan.num_slots:
            # The rank reads in a later call, so that an owner may die in between.
            found = flow.microbatches.locate(rank.unit, rank.slot, rank.number)
            rank.located = found[0] if found else None
            return rank.located is not None
        else:
            flow.finish((report(plan.unit, rank.number),), ())
            self._take_events()
            rank.unit, rank.slot, rank.running = rank.unit + 1, 0, False
            rank.pool.close()
            rank.pool = self._open_pool()
        return True

    def _read(self, rank: Rank, location: MicrobatchLocation, positions: tuple[int, ...]) -> None:
        rank.located = None
        expected = {(position, part.name): part for position in positions for part in sample_of(position).parts}
        if len(location.parts) != len(expected) or location.rejected:
            raise WrongResult(f"{len(location.parts)} parts were located of {len(expected)}")
        for part in location.parts:
            try:
                data = rank.pool.get(part.extents)
            except OwnerLostError:
                self._result.num_lost_reads += 1
                return  # asks again by position
            size = expected.pop((part.position, part.part))
            if zlib.crc32(data) != zlib.crc32(payload(part.position, size)):
                raise WrongResult(f"{part.part} of position {part.position} has other bytes than were put")
            self._result.num_verified += 1
            self._result.num_split_parts += len(part.extents) > 1
            self._result.most_extents = max(self._result.most_extents, len(part.extents))
        self._flow.microbatches.release(rank.unit, (rank.slot,), rank.number)
        rank.slot += 1

    def _take_events(self) -> None:
        for event in self._flow.log.take():
            if not isinstance(event, UnitDone):
                continue
            for row in event.ledger:
                if self._seen[row.position] or row.state != "consumed":
                    raise WrongResult(
                        f"position {row.position} ended as {row.state}; seen before: {self._seen[row.position]}"
                    )
                self._seen[row.position] = 1
            self._result.num_consumed += len(event.ledger)

    # --- the end ------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        if sum(self._seen) != self._num_samples:
            raise WrongResult(f"{sum(self._seen)} of {self._num_samples} positions were consumed")
        ready_nbytes = sum(part.nbytes for ready in self._flow.parts.holdings._ready_of.values() for part in ready)
        if ready_nbytes:
            raise WrongResult(f"the parts table ends with READY bytes: {ready_nbytes}")

    def _check_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + END_S
        while left := holders(self._run_id):
            if time.monotonic() > deadline_s:
                raise WrongResult(f"memory of the pool is still mapped by: {left}")
            time.sleep(0.05)
