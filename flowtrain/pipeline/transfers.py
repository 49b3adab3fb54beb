"""Puts the transfers into orders of computations, so that any order that can run becomes lists that cannot hang.

All transfers get one common order: by the time at which what they carry is made, when the orders run with the given
durations. Every rank launches its transfers in that order, and waits for one only where that time has passed: so the
first transfer that has not ended can always go on, without any buffering, even where a rank's groups of launches run
strictly one after the other. Only the speed depends on how true the durations are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule, shared_action
from flowtrain.pipeline.dataflow import WHOLE, Dataflow, Transfer, Work, trace_dataflow
from flowtrain.pipeline.grid import refuse

Duration = Callable[[Action], float]


def typical_duration(action: Action) -> float:
    """A backward takes about twice a forward; what it recomputes is left out, since only the order depends on it."""
    return 1.0 if action.kind is ActionKind.FORWARD_STAGE else 2.0


def insert_transfers(
    orders: Sequence[Sequence[Action]], *, training: bool, num_microbatches: int, duration: Duration = typical_duration
) -> Schedule:
    """Lists of all ranks from the order in which each computes (compute actions only).

    A receive is launched before the computation during which its data is made, so that it overlaps, and waited for
    before the one that uses it; a send is waited for before the next one to the same peer with the same payload.
    duration: of a computation, in any unit, above 0; only the order and overlap of the transfers depend on it.
    Raises ScheduleError where the orders are incomplete or wait for each other in a circle.
    """
    flow = trace_dataflow(orders, training=training, num_microbatches=num_microbatches)
    spans = run_orders(orders, flow, duration)
    builders = [_ListBuilder(actions, rank_spans) for actions, rank_spans in zip(orders, spans, strict=True)]
    made: list[tuple[float, Transfer]] = []
    for work, (rank, index) in flow.places.items():
        made += ((spans[rank][index][1], transfer) for transfer in flow.sends(work))
    for made_s, transfer in sorted(made):  # the common order; equal times are told apart by what is carried
        (sender, sent_after), (receiver, used_by) = (flow.places[work] for work in flow.ends(transfer))
        part = None if transfer[3] == WHOLE else transfer[3]
        payload = Payload.GRADIENT if transfer[0] else Payload.ACTIVATION
        builders[sender].add_send(payload, part, sent_after, receiver)
        builders[receiver].add_receive(payload, part, used_by, sender, made_s)
    return tuple(builder.build() for builder in builders)


def run_orders(
    orders: Sequence[Sequence[Action]], flow: Dataflow, duration: Duration
) -> tuple[list[tuple[float, float]], ...]:
    """Start and end of every computation when each starts as soon as its rank and what it needs allow.

    Transfers take no time. Raises ScheduleError where the orders wait for each other in a circle.
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
    """Collects one rank's transfers, in the common order, and weaves them into its computations.

    Before each computation there are two places for launches: first what runs while the rank is idle or has been
    sending, then, after the waits for the computation's own input, what runs while it computes. Neighbouring launches
    form one group, whose members may have to be waited for together.
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
        """A transfer of what computation ``after`` made."""
        self._launch((after + 1, False), self._transfer(ActionKind.ISEND, payload, part, after, peer))
        wait = self._transfer(ActionKind.WAIT_ISEND, payload, part, after, peer)
        self._sent.setdefault(after + 1, []).append(wait)

    def add_receive(self, payload: Payload, part: int | None, used_by: int, peer: int, made_s: float) -> None:
        """A transfer of what computation ``used_by`` needs, made at a time, never before an earlier one's launch."""
        started = bisect_left(self._starts, made_s)  # computations that began before
        overlaps = started > 0 and made_s <= self._spans[started - 1][1]
        place = max(self._last, (started - 1, True) if overlaps else (started, False))
        self._launch(place, self._transfer(ActionKind.IRECV, payload, part, used_by, peer))
        self._inputs.setdefault(used_by, []).append(self._transfer(ActionKind.WAIT_IRECV, payload, part, used_by, peer))

    def build(self) -> tuple[Action, ...]:
        """The list, with every send waited for."""
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
        """Waits for the sends that others of their kind follow here; those others become the unfinished ones."""
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
