"""A pipeline of scalar stages over threads, exact in integers, on a transport that buffers nothing.

Stage s computes ``y = w_s * x + s`` for each number of a microbatch; the loss is half the sum of squares. Stages are
counted over encoder and backbone; the first ones may be frozen. The transport
has the restrictions that the validator assumes: transfers between two ranks match by order alone, a rank's groups of
launches run one after the other, and a wait lasts until its whole group has ended.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from flowtrain.pipeline.actions import Action, ActionKind, Payload, StageModule
from flowtrain.pipeline.executor import execute
from flowtrain.pipeline.partition import Partition

LIMIT_S = 5.0
Numbers = list[int]


def plain_gradients(weights: Sequence[int], microbatches: Sequence[Numbers], num_frozen: int = 0) -> list[int]:
    """The gradient of every weight without any pipeline; 0 for those of frozen stages."""
    gradients = [0] * len(weights)
    for number in (number for microbatch in microbatches for number in microbatch):
        inputs = [number]
        for stage, weight in enumerate(weights):
            inputs.append(weight * inputs[-1] + stage)
        gradient = inputs.pop()
        for stage in reversed(range(len(weights))):
            gradients[stage] += gradient * inputs[stage]
            gradient *= weights[stage]
    return [0 if stage < num_frozen else gradient for stage, gradient in enumerate(gradients)]


@dataclass(eq=False)
class _Group:
    rank: int
    left: int = 0
    ends: list[_End] = field(default_factory=list)


@dataclass(eq=False)
class _End:
    action: Action
    group: _Group
    numbers: Numbers | None


class HangError(Exception):
    """Every rank that has not finished waits for another one."""


class Wires:
    """Connects the ranks; it breaks when a rank fails or no rank can continue, so that no rank waits forever."""

    def __init__(self, num_ranks: int) -> None:
        self._changed = threading.Condition()
        self._num_running = num_ranks
        self._waiting: dict[int, _Group] = {}
        self._queues: defaultdict[int, deque[_Group]] = defaultdict(deque)  # the first one runs
        self._open: defaultdict[tuple[int, int, bool], deque[_End]] = defaultdict(deque)  # source, destination, sending
        self._is_broken = False

    def launch(self, group: _Group) -> None:
        with self._changed:
            self._queues[group.rank].append(group)
            if len(self._queues[group.rank]) == 1:
                self._run(group)
            self._changed.notify_all()

    def wait(self, group: _Group) -> None:
        with self._changed:
            self._waiting[group.rank] = group
            self._break_if_stuck()
            done = self._changed.wait_for(lambda: group.left == 0 or self._is_broken, LIMIT_S)
            del self._waiting[group.rank]
            if not done or group.left:
                raise HangError(f"rank {group.rank} waits for {[str(end.action) for end in group.ends]}")

    def leave(self, *, failed: bool) -> None:
        """A rank is at the end of its list."""
        with self._changed:
            self._num_running -= 1
            self._is_broken |= failed
            self._break_if_stuck()
            self._changed.notify_all()

    def _break_if_stuck(self) -> None:
        if len(self._waiting) == self._num_running and all(group.left for group in self._waiting.values()):
            self._is_broken = True
            self._changed.notify_all()

    def _run(self, group: _Group) -> None:
        for end in group.ends:
            peer, sending = end.action.peer, end.action.kind is ActionKind.ISEND
            lane = (group.rank, peer) if sending else (peer, group.rank)
            facing = self._open[*lane, not sending]
            if not facing:
                self._open[*lane, sending].append(end)
                continue
            other = facing.popleft()
            send, receive = (end, other) if sending else (other, end)
            receive.numbers = send.numbers
            for done in (end.group, other.group):
                done.left -= 1
                if done.left == 0:
                    self._run_next(done.rank)

    def _run_next(self, rank: int) -> None:
        queue = self._queues[rank]
        queue.popleft()
        if queue:
            self._run(queue[0])


class ScalarRuntime:
    """The stages of one rank."""

    def __init__(
        self, rank: int, wires: Wires, weights: Sequence[int], num_parts: Sequence[int], partition: Partition | None
    ) -> None:
        self._rank, self._wires, self._weights, self._num_parts = rank, wires, weights, num_parts
        self._stages = () if partition is None else partition.stages
        self._num_encoder = sum(stage.module is StageModule.ENCODER for stage in self._stages)
        self._values: dict[tuple[Payload, int, int, int | None], Numbers] = {}  # by the stage that produced them
        self._inputs: dict[tuple[int, int, int | None], Numbers] = {}
        self._launched: dict[Action, _End] = {}
        self.gradients: dict[int, int] = {}
        self.finished: list[int] = []

    def forward_stage(self, action: Action, microbatch: Numbers) -> None:
        stage, k, part = self._position(action), action.microbatch, action.sub_microbatch
        assert stage not in self.finished
        if stage == 0:
            inputs = microbatch if part is None else cut(microbatch, self._num_parts[k])[part]
        else:
            inputs = self._take(Payload.ACTIVATION, stage - 1, k, part)
        if not self._stages or self._stages[stage].has_backward:
            self._inputs[stage, k, part] = inputs
        outputs = [self._weights[stage] * number + stage for number in inputs]
        self._values[Payload.ACTIVATION, stage, k, part] = outputs

    def backward_stage(self, action: Action, microbatch: Numbers, *, is_last: bool) -> None:
        stage, k, part = self._position(action), action.microbatch, action.sub_microbatch
        assert stage not in self.finished
        is_loss = stage + 1 == len(self._weights)
        gradient = self._take(
            Payload.ACTIVATION if is_loss else Payload.GRADIENT, stage if is_loss else stage + 1, k, part
        )
        inputs = self._inputs.pop((stage, k, part))
        own = sum(each * number for each, number in zip(gradient, inputs, strict=True))
        self.gradients[stage] = self.gradients.get(stage, 0) + own
        self._values[Payload.GRADIENT, stage, k, part] = [self._weights[stage] * each for each in gradient]
        if is_last:
            self.finished.append(stage)

    def start_transfers(self, launches: Sequence[tuple[Action, Numbers]]) -> None:
        group = _Group(self._rank, left=len(launches))
        for action, _ in launches:
            numbers = None
            if action.kind is ActionKind.ISEND:
                assert action.payload is not None
                numbers = self._take(action.payload, self._position(action), action.microbatch, action.sub_microbatch)
            self._launched[action] = _End(action, group, numbers)
            group.ends.append(self._launched[action])
        self._wires.launch(group)

    def wait_transfer(self, action: Action) -> None:
        end = self._launched.pop(action.launch)
        self._wires.wait(end.group)
        if action.kind is ActionKind.WAIT_IRECV:
            assert end.numbers is not None and action.payload is not None
            maker = self._position(action) + (1 if action.payload is Payload.GRADIENT else -1)
            self._values[action.payload, maker, action.microbatch, action.sub_microbatch] = end.numbers

    def is_empty(self) -> bool:
        return not (self._launched or self._inputs)

    def _position(self, action: Action) -> int:
        return action.stage + (self._num_encoder if action.module is StageModule.BACKBONE else 0)

    def _take(self, payload: Payload, maker: int, k: int, part: int | None) -> Numbers:
        """The result of a stage, as the requested whole or part."""
        key = (payload, maker, k, part)
        if key in self._values:
            return self._values.pop(key)
        if part is None:
            return [
                each for index in range(self._num_parts[k]) for each in self._values.pop((payload, maker, k, index))
            ]
        return cut(self._values[payload, maker, k, None], self._num_parts[k])[part]


def cut(numbers: Numbers, num_parts: int) -> list[Numbers]:
    """Split into neighbouring parts, the first ones longer."""
    size, num_longer = divmod(len(numbers), num_parts)
    starts = [index * size + min(index, num_longer) for index in range(num_parts + 1)]
    return [numbers[start:end] for start, end in pairwise(starts)]


def pipeline_gradients(
    lists: Sequence[Sequence[Action]],
    weights: Sequence[int],
    microbatches: Sequence[Numbers],
    num_parts: Sequence[int] | None = None,
    partition: Partition | None = None,
) -> list[int]:
    """The gradient of every weight by the executors of all ranks; raises HangError if they hang.

    partition: needed for lists with an encoder.
    """
    wires = Wires(len(lists))
    num_parts = num_parts or [1] * len(microbatches)
    runtimes = [ScalarRuntime(rank, wires, weights, num_parts, partition) for rank in range(len(lists))]

    def run(rank: int) -> None:
        failed = True
        try:
            execute(lists[rank], runtimes[rank], lambda k: microbatches[k])
            failed = False
        finally:
            wires.leave(failed=failed)

    with ThreadPoolExecutor(len(lists)) as threads:
        runs = [threads.submit(run, rank) for rank in range(len(lists))]
        failures = [each.exception(2 * LIMIT_S) for each in runs]
    if any(failures):
        raise next(each for each in failures if each is not None)
    assert all(runtime.is_empty() for runtime in runtimes)
    gradients = {stage: value for runtime in runtimes for stage, value in runtime.gradients.items()}
    assert sorted(stage for runtime in runtimes for stage in runtime.finished) == sorted(gradients)
    return [gradients.get(stage, 0) for stage in range(len(weights))]
