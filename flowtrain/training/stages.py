"""Forward and backward of a rank's pipeline stages, and the tensors that travel between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from flowtrain.pipeline.actions import Action, ActionKind, Payload
from flowtrain.training.batch import PackedBatch
from flowtrain.training.chunks import ModelChunks, as_fsdp
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.transfers import Transfers

_Slot = tuple[int, int, int | None]
"""Stage, microbatch, part of it."""


class SpanRecorder(Protocol):
    """Takes a timed stretch of work; times are seconds since the Unix epoch."""

    def __call__(self, name: str, start_s: float, end_s: float, **args: int | float | str) -> None:
        """Record one span; ``args`` go into the trace."""


class Stages:
    """The executor's ``StageRuntime`` over the modules of one rank.

    hidden_size, dtype: of the hidden states between stages.
    reduces_each: sum gradients over the data parallel ranks with every microbatch; else with a unit's last one.
    take_loss: on ranks of the last stage, gets each microbatch with its loss, a float32 scalar without gradient.
    record: gets the spans ``forward`` and ``backward``; on an accelerator each span waits for the device.
    """

    def __init__(
        self,
        model: ModelChunks,
        group: BackboneGroup,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        reduces_each: bool,
        take_loss: Callable[[PackedBatch, torch.Tensor], None],
        record: SpanRecorder | None = None,
    ) -> None:
        self._model = model
        self._group = group
        self._hidden_size, self._dtype = hidden_size, dtype
        self._reduces_each, self._take_loss = reduces_each, take_loss
        self.record = record
        self._transfers = Transfers(group)
        self._loss_scale: float | None = None
        self._graphs: dict[_Slot, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._received: dict[tuple[_Slot, Payload], torch.Tensor] = {}
        self._outgoing: dict[tuple[_Slot, Payload], torch.Tensor] = {}

    def begin(self, loss_scale: float | None) -> None:
        """Start a unit. loss_scale: factor of each microbatch's loss; None without backward."""
        assert self.is_idle, "the unit before has not been finished"
        self._loss_scale = loss_scale

    @property
    def is_idle(self) -> bool:
        """Whether every forward has had its backward, and every received or computed tensor has been used or sent."""
        return not (self._graphs or self._received or self._outgoing)

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """Run a stage forward; keeps its graph if a backward follows."""
        start_s, slot = time.time(), _slot(action)
        hidden, training = self._received.pop((slot, Payload.ACTIVATION), None), self._loss_scale is not None
        if hidden is not None and training:
            hidden.requires_grad_()
        module = self._model.stages[action.stage]
        with torch.set_grad_enabled(training):
            output = module(**microbatch.forward_kwargs(), hidden=hidden, memory=action.memory)
        if module.is_last_stage:
            self._take_loss(microbatch, output.detach())
        else:
            self._hand_on(slot, Payload.ACTIVATION, output.detach())
        if training:
            self._graphs[slot] = hidden, output
        self._span("forward", start_s, action, microbatch)

    def backward_stage(self, action: Action, microbatch: PackedBatch, *, is_last: bool) -> None:
        """Run a stage backward; its last backward, or each one, also sums gradients over the data parallel ranks.

        Under hybrid sharding a shard group sums with either of them, and the groups among each other with the last one.
        """
        assert self._loss_scale is not None, "an evaluation has no backward"
        start_s, slot = time.time(), _slot(action)
        module = self._model.stages[action.stage]
        fsdp = as_fsdp(module)
        reduces = is_last or self._reduces_each
        fsdp.set_requires_gradient_sync(reduces)
        fsdp.set_requires_all_reduce(is_last)
        # FSDP then frees the buffers of the reduction; otherwise they wait for the next backward.
        fsdp.set_is_last_backward(reduces)
        fsdp.set_reshard_after_backward(is_last or self._model.shards_parameters)
        hidden, output = self._graphs.pop(slot)
        if module.is_last_stage:
            (output * self._loss_scale).backward()
        else:
            torch.autograd.backward(output, self._received.pop((slot, Payload.GRADIENT)))
        if hidden is not None:
            assert hidden.grad is not None
            self._hand_on(slot, Payload.GRADIENT, hidden.grad)
        self._span("backward", start_s, action, microbatch)

    def start_transfers(self, launches: Sequence[tuple[Action, PackedBatch]]) -> None:
        """Launch neighbouring sends and receives together; both ends know the shape from their microbatch."""
        self._transfers.start([(action, self._tensor_of(action, batch)) for action, batch in launches])

    def wait_transfer(self, action: Action) -> None:
        """Wait for a transfer; a received tensor is then ready for its stage."""
        tensor = self._transfers.wait(action)
        if action.kind is ActionKind.WAIT_IRECV:
            assert action.payload is not None
            self._received[_slot(action), action.payload] = tensor

    def _hand_on(self, slot: _Slot, payload: Payload, tensor: torch.Tensor) -> None:
        """Keep a result for the transfer that sends it, or for the neighbouring stage if this rank has that too."""
        stage, microbatch, part = slot
        neighbour = stage + (1 if payload is Payload.ACTIVATION else -1)
        if neighbour in self._model.stages:
            self._received[(neighbour, microbatch, part), payload] = tensor
        else:
            self._outgoing[slot, payload] = tensor

    def synchronize(self) -> None:
        """Wait for the accelerator, where there is one."""
        if self._group.device.type != "cpu":
            torch.accelerator.synchronize(self._group.device)

    def _tensor_of(self, action: Action, batch: PackedBatch) -> torch.Tensor:
        assert action.payload is not None
        if action.kind is ActionKind.ISEND:
            return self._outgoing.pop((_slot(action), action.payload)).contiguous()
        num_tokens = self._model.stages[action.stage].hidden_tokens(len(batch.input_ids))
        return torch.empty(1, num_tokens, self._hidden_size, dtype=self._dtype, device=self._group.device)

    def _span(self, name: str, start_s: float, action: Action, batch: PackedBatch) -> None:
        if self.record is None:
            return
        self.synchronize()
        args = {"microbatch": action.microbatch, "stage": action.stage, "num_tokens": batch.num_tokens}
        self.record(name, start_s, time.time(), **args)


def _slot(action: Action) -> _Slot:
    return action.stage, action.microbatch, action.sub_microbatch
