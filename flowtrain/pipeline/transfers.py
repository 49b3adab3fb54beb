"""Adds the transfers to orders of computations, so that any order that can run becomes lists that cannot hang.

All transfers get one common order: by the time at which their payload is produced when the orders run with the given
durations. Every rank launches its transfers in that order, and waits for a transfer only after that time. So the first
transfer that has not ended can always continue without any buffering, even if a rank's groups of launches run strictly
one after the other. Only the speed depends on the accuracy of the durations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule, StageModule, shared_action
from flowtrain.pipeline.dataflow import WHOLE, Dataflow, Transfer, Work, trace_dataflow
from flowtrain.pipeline.grid import refuse

Duration = Callable[[Action], float]


def typical_duration(action: Action) -> float:
    """A backward takes about twice a forward. Recomputation is left out: only the order depends on the durations."""
    return 1.0 if action.kind is ActionKind.FORWARD_STAGE else 2.0


def insert_transfers(
    orders: Sequence[Sequence[Action]],
    *,
    training: bool,
    num_microbatches: int,
    frozen: Collection[StageModule] = (),
    duration: Duration = typical_duration,
) -> Schedule:
    """Action lists of all ranks, from the order in which each rank computes (compute actions only).

    A receive is launched before the computation during which its data is produced, so that it overlaps. The wait for it
    comes before the computation that uses it. The wait for a send comes before the next send of the same payload to the
    same peer. Neighbouring stages on one rank need no transfer.
    frozen: modules without backward (`Partition.frozen`).
    duration: of a computation, in any unit, above 0; only the order and overlap of the transfers depend on it.
    Raises ScheduleError if the orders are incomplete or wait for each other in a circle.
    """
    flow = trace_dataflow(orders, training=training, num_microbatches=num_microbatches, frozen=frozen)
    spans = run_orders(orders, flow, duration)
    builders = [_ListBuilder(actions, rank_spans) for actions, rank_spans in zip(orders, spans, strict=True)]
    produced: list[tuple[float, Transfer]] = []
    for work, (rank, index) in flow.places.items():
        produced += ((spans[rank][index][1], transfer) for transfer in flow.sends(work))
    for produced_s, transfer in sorted(produced):  # the common order; ties: by the transfer's tuple
        (sender, sent_after), (receiver, used_by) = (flow.places[work] for work in flow.ends(transfer))
        part = None if transfer[3] == WHOLE else transfer[3]
        payload = Payload.GRADIENT if transfer[0] else Payload.ACTIVATION
        builders[sender].add_send(payload, part, sent_after, receiver)
        builders[receiver].add_receive(payload, part, used_by, sender, produced_s)
    return tuple(builder.build() for builder in builders)


def run_orders(
    orders: Sequence[Sequence[Action]], flow: Dataflow, duration: Duration
) -> tuple[list[tuple[float, float]], ...]:
    """Start and end of every computation, if each starts as soon as its rank is free and its inputs are computed.

    Transfers take no time. Raises ScheduleError if the orders wait for each other in a circle.
    """
    works = [[flow.work(action) for action in actions] for actions in orders]
    spans: tuple[list[tuple[float, float]], ...] = tuple([] for _ in orders)
    waiting: dict[Work, list[int]] = {}  # ranks to look at again when a computation is done
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        mine = spans[rank]
        while len(mine) < len(orders[rank]):
            start = mine[-1][1] if mine else 0.0
            missing = None
            for need in flow.needs(works[rank][len(mine)]):
                where, index = flow.places[need]
                if index >= len(spans[where]):
                    missing = need
                    break
                start = max(start, spans[where][index][1])
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done = works[rank][len(mine)]
            mine.append((start, start + duration(orders[rank][len(mine)])))
            ready += waiting.pop(done, ())
    stuck = [(rank, len(mine)) for rank, mine in enumerate(spans) if len(mine) < len(orders[rank])]
    if stuck:
        refuse(orders, "the orders wait for each other in a circle, from the marked actions on", stuck)
    return spans


class _ListBuilder:
    """Collects one rank's transfers, in the common order, and inserts them between its computations.

    Before each computation there are two places for launches: the first for sends and for receives that run while the
    rank is idle; the second, after the waits for the computation's input, for receives that run while it computes.
    Neighbouring launches form one group; a wait for one member may wait for all of them.
    """

    def __init__(self, actions: Sequence[Action], spans: Sequence[tuple[float, float]]) -> None:
        self._actions, self._spans = actions, spans
        self._starts = [start for start, _ in spans]
        self._launches: dict[tuple[int, bool], list[Action]] = {}  # by (computation that follows, while it computes)
        self._last = (0, False)
        self._inputs: dict[int, list[Action]] = {}
        self._sent: dict[int, list[Action]] = {}  # waits for sends, by the computation that follows the send
        self._unfinished: dict[tuple[int | None, Payload | None], list[Action]] = {}

    def add_send(self, payload: Payload, part: int | None, after: int, peer: int) -> None:
        """Add a transfer of the result of computation ``after``."""
        self._launch((after + 1, False), self._transfer(ActionKind.ISEND, payload, part, after, peer))
        wait = self._transfer(ActionKind.WAIT_ISEND, payload, part, after, peer)
        self._sent.setdefault(after + 1, []).append(wait)

    def add_receive(self, payload: Payload, part: int | None, used_by: int, peer: int, produced_s: float) -> None:
        """Add a transfer that computation ``used_by`` needs; never placed before a launch that was added earlier."""
        started = bisect_left(self._starts, produced_s)  # computations that began before
        overlaps = started > 0 and produced_s <= self._spans[started - 1][1]
        place = max(self._last, (started - 1, True) if overlaps else (started, False))
        self._launch(place, self._transfer(ActionKind.IRECV, payload, part, used_by, peer))
        self._inputs.setdefault(used_by, []).append(self._transfer(ActionKind.WAIT_IRECV, payload, part, used_by, peer))

    def build(self) -> tuple[Action, ...]:
        """The complete list, with a wait for every send."""
        actions: list[Action] = []
        for index, action in enumerate(self._actions):
            actions += self._sends_to_end(index)
            actions += self._launches.get((index, False), ())
            actions += self._inputs.get(index, ())
            actions += self._launches.get((index, True), ())
            actions.append(action)
        actions += self._sends_to_end(len(self._actions))
        actions += self._launches.get((len(self._actions), False), ())
        return (*actions, *(wait for waits in self._unfinished.values() for wait in waits))

    def _launch(self, place: tuple[int, bool], launch: Action) -> None:
        assert place >= self._last
        self._last = place
        self._launches.setdefault(place, []).append(launch)

    def _sends_to_end(self, index: int) -> list[Action]:
        """Waits for earlier sends in the lanes of the sends of this place; the new sends become the unfinished ones."""
        sent = self._sent.get(index, [])
        ended = [wait for lane in dict.fromkeys(map(_lane, sent)) for wait in self._unfinished.pop(lane, ())]
        for wait in sent:
            self._unfinished.setdefault(_lane(wait), []).append(wait)
        return ended

    def _transfer(self, kind: ActionKind, payload: Payload, part: int | None, index: int, peer: int) -> Action:
        own = self._actions[index]
        return shared_action(
            kind,
            own.stage,
            own.microbatch,
            segment=own.segment,
            module=own.module,
            sub_microbatch=part,
            peer=peer,
            payload=payload,
        )


def _lane(wait: Action) -> tuple[int | None, Payload | None]:
    return wait.peer, wait.payload
