"""Point-to-point transfers between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flowtrain.pipeline.actions import Action, ActionKind, Payload, StageModule
from flowtrain.training.mesh import PP_AXIS, BackboneGroup

_Key = tuple[bool, Payload, StageModule, int, int, int | None, int | None]


class Transfers:
    """Starts and waits for an action list's transfers; each is one tensor.

    Of hidden states between decoder layers, sequence parallelism leaves this rank's slice of the tokens. A tensor
    without elements is not sent: both ends know that.
    """

    def __init__(self, group: BackboneGroup) -> None:
        self._group = group
        self._process_group = group.mesh.get_group(PP_AXIS)
        # In NCCL all ranks of a group must take part in its first operation; not all take part in a first transfer.
        dist.all_reduce(torch.zeros(1, device=group.device), group=self._process_group)
        self._pending: dict[_Key, tuple[dist.Work | None, torch.Tensor]] = {}

    def start(self, launches: Sequence[tuple[Action, torch.Tensor]]) -> None:
        """Launch neighbouring transfers together, so that a send and a receive between two ranks cannot block.

        The tensor is the data to send, or the buffer to fill; do not touch it before ``wait``.
        """
        operations = [self._operation(action, tensor) for action, tensor in launches if tensor.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []
        # Some backends return one handle for all transfers: the first wait then covers the rest too.
        if len(works) != len(operations):
            works = [works[0]] * len(operations)
        remaining = iter(works)
        for action, tensor in launches:
            assert _key(action) not in self._pending, f"{action} was launched before and not waited for"
            self._pending[_key(action)] = next(remaining) if tensor.numel() else None, tensor

    def wait(self, action: Action) -> torch.Tensor:
        """Wait for a transfer; returns its tensor. The group's timeout bounds the wait."""
        work, tensor = self._pending.pop(_key(action))
        if work is not None:
            work.wait()
        return tensor

    def _operation(self, action: Action, tensor: torch.Tensor) -> dist.P2POp:
        assert action.peer is not None
        launch = dist.isend if action.kind is ActionKind.ISEND else dist.irecv
        return dist.P2POp(launch, tensor, self._group.pipeline_peer(action.peer), self._process_group)


def _key(action: Action) -> _Key:
    """Key by which a wait finds its launch."""
    assert action.payload is not None
    part = action.microbatch, action.sub_microbatch
    return action.kind.is_sending, action.payload, action.module, action.stage, *part, action.peer
