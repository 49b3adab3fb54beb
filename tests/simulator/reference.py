"""Times of action lists by rules as plain as possible: what the engine must give, slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule, StageModule

Times = Callable[[int, Action], float]
"""Of a replica's action: seconds of a computation, or of the transfer of a launch."""


def finish_times(
    replicas: Sequence[Schedule],
    times: Times,
    *,
    buffered: bool = True,
    ready: Callable[[int, int], float] = lambda replica, microbatch: 0.0,
    gathers: str = "never",
    reduces_each: bool = False,
    shard_size: int = 1,
) -> list[list[float]]:
    """When each rank of each replica is done.

    gathers: ranks of a set of shards meet before each computation, or once before the first of each stage; not of a
        frozen encoder, which each replica has whole.
    reduces_each: they meet after each backward. All replicas meet after the last backward of each stage.
    """
    ranks = [(d, r) for d, lists in enumerate(replicas) for r in range(len(lists))]
    at, clock, fetched = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0)
    launched: dict[tuple[int, Action], float] = {}
    arrived: dict[tuple[int, Action], float] = {}
    link: dict[tuple[int, int, int], float] = {}
    met: dict[tuple[int, int, str], dict[int, float]] = {}
    last = {(d, r): _last_backwards(lists[r]) for d, lists in enumerate(replicas) for r in range(len(lists))}

    trains_encoder = any(
        action.kind is ActionKind.BACKWARD_STAGE and action.module is StageModule.ENCODER
        for actions in replicas[0]
        for action in actions
    )

    def meet(rank: tuple[int, int], what: str, size: int) -> float | None:
        come = met.setdefault((rank[1], at[rank], f"{what} {rank[0] // size}"), {})
        come.setdefault(rank[0], clock[rank])
        return max(come.values()) if len(come) == size else None

    def arrival(d: int, send: Action, source: int, destination: int) -> float | None:
        """Transfers of a link go one after the other, in the order of their launches."""
        if (d, send) in arrived:
            return arrived[d, send]
        earlier = [each for each in replicas[d][source] if each.kind is ActionKind.ISEND and each.peer == destination]
        for each in earlier[: earlier.index(send) + 1]:
            if (d, each) in arrived:
                continue
            receive = _other_end(replicas[d][destination], each, earlier.index(each), source)
            if (d, each) not in launched or (not buffered and (d, receive) not in launched):
                return None
            begins = launched[d, each] if buffered else max(launched[d, each], launched[d, receive])
            begins = max(begins, link.get((d, source, destination), 0.0))
            link[d, source, destination] = arrived[d, each] = begins + times(d, each)
        return arrived[d, send]

    def step(rank: tuple[int, int]) -> bool:
        d, r = rank
        action = replicas[d][r][at[rank]]
        while fetched[rank] <= _needed(replicas[d][r], at[rank]):
            clock[rank] = max(clock[rank], ready(d, fetched[rank]))
            fetched[rank] += 1
        if action.kind.is_compute:
            stage = action.module, action.stage
            before = [each for each in replicas[d][r][: at[rank]] if each.kind.is_compute]
            is_first = all((each.module, each.stage) != stage for each in before)
            has_shards = action.module is StageModule.BACKBONE or trains_encoder
            if len(replicas) > 1 and has_shards and (gathers == "each" or (gathers == "once" and is_first)):
                begins = meet(rank, "before", shard_size)
                if begins is None:
                    return False
                clock[rank] = begins
            done = met.setdefault((-1 - r, at[rank], "done"), {})
            if d not in done:
                done[d] = clock[rank] + times(d, action)
            clock[rank] = done[d]
            is_backward = action.kind is ActionKind.BACKWARD_STAGE
            if len(replicas) > 1 and is_backward and (at[rank] in last[rank] or reduces_each):
                ends = meet(rank, "after", len(replicas) if at[rank] in last[rank] else shard_size)
                if ends is None:
                    return False
                clock[rank] = ends
        elif action.kind.is_launch:
            launched[d, action] = clock[rank]
        elif action.kind is ActionKind.WAIT_IRECV or not buffered:
            assert action.peer is not None
            source, destination = (r, action.peer) if action.kind.is_sending else (action.peer, r)
            send = action.launch if action.kind.is_sending else _send_of(replicas[d], r, action.launch)
            at_s = arrival(d, send, source, destination)
            if at_s is None:
                return False
            clock[rank] = max(clock[rank], at_s)
        at[rank] += 1
        return True

    going = True
    while going:
        going = False
        for rank in ranks:
            while at[rank] < len(replicas[rank[0]][rank[1]]) and step(rank):
                going = True
    assert all(at[d, r] == len(replicas[d][r]) for d, r in ranks), "the lists hang"
    return [[clock[d, r] for r in range(len(lists))] for d, lists in enumerate(replicas)]


def _needed(actions: Sequence[Action], at: int) -> int:
    """The latest microbatch of an action and the launches that follow it directly, if it is the first of them."""
    last = at
    if actions[at].kind.is_launch and not (at > 0 and actions[at - 1].kind.is_launch):
        while last + 1 < len(actions) and actions[last + 1].kind.is_launch:
            last += 1
    return max(each.microbatch for each in actions[at : last + 1])


def _send_of(lists: Schedule, rank: int, receive: Action) -> Action:
    """The send that a receive matches: of the same number between the two ranks."""
    assert receive.peer is not None
    mine = [each for each in lists[rank] if each.kind is ActionKind.IRECV and each.peer == receive.peer]
    theirs = [each for each in lists[receive.peer] if each.kind is ActionKind.ISEND and each.peer == rank]
    return theirs[mine.index(receive)]


def _other_end(actions: Sequence[Action], send: Action, number: int, source: int) -> Action:
    receives = [each for each in actions if each.kind is ActionKind.IRECV and each.peer == source]
    assert receives[number].payload is send.payload and isinstance(send.payload, Payload)
    return receives[number]


def _last_backwards(actions: Sequence[Action]) -> set[int]:
    last: dict[tuple[object, int], int] = {}
    for index, action in enumerate(actions):
        if action.kind is ActionKind.BACKWARD_STAGE:
            last[action.module, action.stage] = index
    return set(last.values())
