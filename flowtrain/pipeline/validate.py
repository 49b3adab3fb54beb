"""Refuses action lists that would hang, lose something or hold too much; the error shows where in a grid.

Lists must run on transports that match transfers between two ranks by order alone and buffer nothing, like NCCL with
``batch_isend_irecv``. There, neighbouring launches form one group whose transfers run together; a rank's groups run one
after the other; a wait for one transfer may last until its whole group has ended. Lists that pass here also run on
transports with fewer restrictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flowtrain.pipeline.actions import Action, ActionKind, LayerStrategies, Payload, StageModule
from flowtrain.pipeline.dataflow import WHOLE, Dataflow, Transfer, trace_dataflow
from flowtrain.pipeline.grid import refuse
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.progress import check_progress

Lists = Sequence[Sequence[Action]]
Place = tuple[int, int]  # rank, index in its list
TransferPlaces = dict[ActionKind, dict[Transfer, Place]]


def validate(
    lists: Lists,
    *,
    training: bool,
    num_microbatches: int,
    partition: Partition | None = None,
    frozen: Collection[StageModule] = (),
    held: Callable[[Action], int] | None = None,
    limits: Sequence[int] | None = None,
) -> None:
    """Raise ScheduleError unless the lists compute every microbatch once and run to their end.

    Checked:

    - every stage runs the forward and, if training and not frozen, the backward of every microbatch, on one rank;
    - that is the rank, and the segment, of the stage in the partition, if one is given;
    - every result that another rank needs is sent once, after it is produced, and received once, before it is used,
      between the right ranks, with a wait on both sides;
    - transfers match first in, first out;
    - the ranks do not wait for each other in a circle;
    - no rank holds more than its limit.

    frozen: modules without backward; with a partition, those of the partition.
    held: what a forward action holds until its backward, by its memory strategy (bytes, or 1 to count).
    limits: how much each rank may hold at once. Give both ``held`` and ``limits``, or neither.
    """
    if partition is not None:
        frozen = partition.frozen
        _check_places(lists, partition)
    flow = trace_dataflow(lists, training=training, num_microbatches=num_microbatches, frozen=frozen)
    _check_order(lists, flow)
    transfers = _find_transfers(lists, flow)
    _check_transfers(lists, flow, transfers)
    _check_first_in_first_out(lists, transfers)
    check_progress(lists)
    if held is not None or limits is not None:
        assert held is not None and limits is not None and len(limits) == len(lists)
        if training:
            _check_memory(lists, frozen, held, limits)


def _check_places(lists: Lists, partition: Partition) -> None:
    """Every action lies where the partition has its stage, and all stages of the partition have actions."""
    stages = {(stage.module, stage.index): stage for stage in partition.stages}
    if len(lists) != partition.pp_size:
        refuse(lists, f"there are lists of {len(lists)} ranks, and the partition has {partition.pp_size}", [])
    seen: set[tuple[StageModule, int]] = set()
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            stage = stages.get((action.module, action.stage))
            if stage is None:
                refuse(lists, f"{action}: the partition has no such stage", [(rank, index)])
            if (stage.rank, stage.segment) != (rank, action.segment):
                why = (
                    f"rank {rank} has {action}; the partition has that stage on rank {stage.rank}, in segment "
                    f"{stage.segment}"
                )
                refuse(lists, why, [(rank, index)])
            memory = action.memory
            if isinstance(memory, LayerStrategies) and len(memory.kinds) != len(stage.layers):
                why = (
                    f"{action} has memory strategies for {len(memory.kinds)} layers, and its stage {len(stage.layers)}"
                )
                refuse(lists, why, [(rank, index)])
            seen.add((action.module, action.stage))
    missing = [f"{module} stage {index}" for module, index in stages if (module, index) not in seen]
    if missing and seen:
        refuse(lists, f"the lists lack {', '.join(missing)} of the partition", [])


def _check_order(lists: Lists, flow: Dataflow) -> None:
    """A computation comes after its inputs from the same rank."""
    for work, (rank, index) in flow.places.items():
        for need in flow.needs(work):
            where, before = flow.places[need]
            if where == rank and before > index:
                why = f"rank {rank} runs {lists[rank][index]} before {lists[rank][before]}, which it needs"
                refuse(lists, why, [(rank, index), (rank, before)])


def _find_transfers(lists: Lists, flow: Dataflow) -> TransferPlaces:
    """The place of every transfer action, by kind and transfer; each occurs once."""
    found: TransferPlaces = {kind: {} for kind in ActionKind if not kind.is_compute}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if action.kind.is_compute:
                continue
            position = flow.positions[action.module, action.stage]
            is_gradient = action.payload is Payload.GRADIENT
            if not action.kind.is_sending:
                position += 1 if is_gradient else -1
            part = WHOLE if action.sub_microbatch is None else action.sub_microbatch
            transfer = (is_gradient, position, action.microbatch, part)
            first = found[action.kind].setdefault(transfer, (rank, index))
            if first != (rank, index):
                refuse(lists, f"rank {rank} has {action} twice", [first, (rank, index)])
    return found


def _check_transfers(lists: Lists, flow: Dataflow, found: TransferPlaces) -> None:
    """The lists have exactly the transfers that the computations need, with launch and wait at the right places."""
    needed = {transfer for work in flow.places for transfer in flow.sends(work)}
    for places in found.values():
        for transfer in places.keys() - needed:
            rank, index = places[transfer]
            refuse(lists, f"rank {rank}: {lists[rank][index]} is not needed by another rank", [(rank, index)])
    sent, sent_end = found[ActionKind.ISEND], found[ActionKind.WAIT_ISEND]
    received, received_end = found[ActionKind.IRECV], found[ActionKind.WAIT_IRECV]
    for transfer in sorted(needed):
        produced, used = (flow.places[work] for work in flow.ends(transfer))
        _check_sequence(lists, _SENDING, (produced, sent.get(transfer), sent_end.get(transfer)), used[0])
        _check_sequence(lists, _RECEIVING, (received.get(transfer), received_end.get(transfer), used), produced[0])


_SENDING = ("computation", ActionKind.ISEND, ActionKind.WAIT_ISEND)
_RECEIVING = (ActionKind.IRECV, ActionKind.WAIT_IRECV, "computation")


def _check_sequence(lists: Lists, names: tuple[str, ...], places: tuple[Place | None, ...], peer: int) -> None:
    """The three actions of one end of a transfer exist, in this order, with the right peer."""
    present = [place for place in places if place is not None]
    rank = present[0][0]
    actions = [lists[rank][index] for _, index in present]
    if len(present) < len(places):
        missing = names[places.index(None)]
        refuse(lists, f"rank {rank}: {actions[0]} has no {missing}; the other end is on rank {peer}", present)
    for action, place in zip(actions, present, strict=True):
        if action.peer != peer and not action.kind.is_compute:
            refuse(lists, f"rank {rank}: {action} names the wrong peer; the other end is on rank {peer}", [place])
    if not present[0] < present[1] < present[2]:
        refuse(lists, f"rank {rank}: {', '.join(map(str, actions))} must come in this order", present)


def _check_first_in_first_out(lists: Lists, found: TransferPlaces) -> None:
    """The sends from one rank to another are received in the order in which they are launched."""
    sends, receives = found[ActionKind.ISEND], found[ActionKind.IRECV]  # in the order of the lists
    lanes: dict[Place, tuple[list[Transfer], list[Transfer]]] = {}  # by (source, destination)
    for transfer, (rank, _) in sends.items():
        lanes.setdefault((rank, receives[transfer][0]), ([], []))[0].append(transfer)
    for transfer, (rank, _) in receives.items():
        lanes[sends[transfer][0], rank][1].append(transfer)
    for (source, destination), lane in lanes.items():
        for sent, received in zip(*lane, strict=True):
            if sent != received:
                places = [sends[sent], receives[received]]
                send, receive = (lists[rank][index] for rank, index in places)
                why = (
                    f"rank {source} launches {send} where rank {destination} launches {receive}; transfers between two "
                    "ranks match in the order of their launches"
                )
                refuse(lists, why, places)


def _check_memory(
    lists: Lists, frozen: Collection[StageModule], held: Callable[[Action], int], limits: Sequence[int]
) -> None:
    """Between forwards and their backwards no rank holds more than its limit."""
    for rank, actions in enumerate(lists):
        total = 0
        sizes: dict[tuple[object, ...], int] = {}
        for index, action in enumerate(actions):
            if action.kind.is_compute and action.module not in frozen:
                key = (action.module, action.stage, action.microbatch, action.sub_microbatch)
                if action.kind is ActionKind.BACKWARD_STAGE:
                    total -= sizes.pop(key)
                    continue
                sizes[key] = held(action)
                total += sizes[key]
                if total > limits[rank]:
                    why = (
                        f"rank {rank} holds {total} after {action}, for {len(sizes)} forwards without their backward, "
                        f"more than its limit of {limits[rank]}"
                    )
                    refuse(lists, why, [(rank, index)])
