"""Forward and backward of a rank's pipeline stages, and the tensors that travel between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from flowtrain.pipeline.actions import Action, ActionKind, Payload, StageModule
from flowtrain.pipeline.image_parts import image_parts
from flowtrain.training.batch import ImageBatch, PackedBatch
from flowtrain.training.chunks import ModelChunks, as_fsdp
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.transfers import Transfers
from flowtrain.training.work_spans import SpanRecorder, WorkSpans

_Slot = tuple[int, int, int | None]
"""Place of a stage in the flow, microbatch, part of it (None: the whole)."""


@dataclass(frozen=True, slots=True)
class _Input:
    """What a stage has got from the stage before it."""

    tensor: torch.Tensor
    """All of it; its gradient goes back if it requires one. An input without one is not kept for the backward."""
    parts: tuple[tuple[int | None, int], ...]
    """Name and length (rows) of each part that it was joined of; a whole one is one part."""

    def gradients(self) -> Iterable[tuple[int | None, torch.Tensor]]:
        """The gradient by part."""
        assert self.tensor.grad is not None
        if len(self.parts) == 1:
            return [(self.parts[0][0], self.tensor.grad)]
        names, lengths = zip(*self.parts, strict=True)
        return zip(names, self.tensor.grad.split(lengths), strict=True)


class Stages:
    """The executor's ``StageRuntime`` over the modules of one rank.

    dtype: of what travels between stages. Between backbone stages these are hidden states ``[1, tokens, hidden size]``
    of the microbatch; between encoder stages ``[tokens of all its images, D]``; between the two feature rows,
    ``[rows, D]``. Encoder stages may run parts of a microbatch's images; the stage after them joins the parts.
    reduces_each: sum gradients over the data parallel ranks with every microbatch; else with a unit's last one.
    take_loss: on ranks of the last stage, gets each microbatch with its loss, a float32 scalar without gradient, and
        with ``row_losses`` in training the losses of its tokens that have a target, float32 ``[n]``; else None.
    row_losses: keep these losses.
    record: gets the spans ``forward`` and ``backward``, on an accelerator with the device's times (``WorkSpans``).
    """

    def __init__(
        self,
        model: ModelChunks,
        group: BackboneGroup,
        *,
        dtype: torch.dtype,
        reduces_each: bool,
        take_loss: Callable[[PackedBatch, torch.Tensor, torch.Tensor | None], None],
        record: SpanRecorder | None = None,
        row_losses: bool = False,
    ) -> None:
        self._model = model
        self._group = group
        self._dtype = dtype
        self._reduces_each, self._take_loss = reduces_each, take_loss
        self._keeps_row_losses = row_losses
        self._row_losses: torch.Tensor | None = None  # of the last forward
        self.spans = WorkSpans(group.device, record)
        self._transfers = Transfers(group)
        self._flow = model.partition.stages
        self._places = {(stage.module, stage.index): place for place, stage in enumerate(self._flow)}
        self._num_parts: dict[int, int] = {}
        self._loss_scale: float | None = None
        self._graphs: dict[_Slot, tuple[_Input | None, torch.Tensor]] = {}
        # By the stage that uses it, and by the stage that sends it.
        self._received: dict[tuple[Payload, _Slot], torch.Tensor] = {}
        self._outgoing: dict[tuple[Payload, _Slot], torch.Tensor] = {}

    def begin(self, loss_scale: float | None, actions: Iterable[Action]) -> None:
        """Start a unit.

        loss_scale: factor of each microbatch's loss; None without backward. actions: the unit's on this rank; they say
        in how many parts each microbatch comes.
        """
        assert self.is_idle, "the unit before has not been finished"
        self._loss_scale = loss_scale
        self._num_parts = {}
        for action in actions:
            if action.sub_microbatch is not None:
                known = self._num_parts.get(action.microbatch, 0)
                self._num_parts[action.microbatch] = max(known, action.sub_microbatch + 1)

    @property
    def is_idle(self) -> bool:
        """Whether every forward has had its backward, and every received or computed tensor has been used or sent."""
        return not (self._graphs or self._received or self._outgoing)

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """Run a stage forward; keeps its graph if a backward follows."""
        with self._timed("forward", action, microbatch):
            self._forward(action, microbatch)

    def _forward(self, action: Action, microbatch: PackedBatch) -> None:
        slot = self._slot(action)
        stage = self._flow[slot[0]]
        training = self._loss_scale is not None and stage.has_backward
        given = self._input(slot, training)
        with torch.set_grad_enabled(training):
            output = self._run(action, microbatch, given)
        if slot[0] == len(self._flow) - 1:
            self._take_loss(microbatch, output.detach(), self._row_losses)
        else:
            self._hand_on(Payload.ACTIVATION, slot, output.detach())
        if training:
            passes_on = given is not None and given.tensor.requires_grad
            self._graphs[slot] = given if passes_on else None, output

    def backward_stage(self, action: Action, microbatch: PackedBatch, *, is_last: bool) -> None:
        """Run a stage backward; its last backward, or each one, also sums gradients over the data parallel ranks.

        Under hybrid sharding a shard group sums with either of them, and the groups among each other with the last one.
        """
        assert self._loss_scale is not None, "an evaluation has no backward"
        with self._timed("backward", action, microbatch):
            self._backward(action, self._loss_scale, is_last)

    def _backward(self, action: Action, loss_scale: float, is_last: bool) -> None:
        slot = self._slot(action)
        fsdp = as_fsdp(self._model.stages[action.module, action.stage])
        reduces = is_last or self._reduces_each
        fsdp.set_requires_gradient_sync(reduces)
        fsdp.set_requires_all_reduce(is_last)
        # FSDP then frees the buffers of the reduction; otherwise they wait for the next backward.
        fsdp.set_is_last_backward(reduces)
        fsdp.set_reshard_after_backward(is_last or self._model.shards_parameters)
        given, output = self._graphs.pop(slot)
        if slot[0] == len(self._flow) - 1:
            (output * loss_scale).backward()
        else:
            torch.autograd.backward(output, self._gradient(slot, output))
        if given is not None:
            for part, gradient in given.gradients():
                self._hand_on(Payload.GRADIENT, (*slot[:2], part), gradient)
        elif slot[0] and self._flow[slot[0] - 1].has_backward:
            self._hand_on(Payload.GRADIENT, slot, self._nothing())

    def start_transfers(self, launches: Sequence[tuple[Action, PackedBatch]]) -> None:
        """Launch neighbouring sends and receives together; both ends know the shape from their microbatch."""
        self._transfers.start([(action, self._tensor_of(action, batch)) for action, batch in launches])

    def wait_transfer(self, action: Action) -> None:
        """Wait for a transfer; a received tensor is then ready for its stage."""
        tensor = self._transfers.wait(action)
        if action.kind is ActionKind.WAIT_IRECV:
            assert action.payload is not None
            self._received[action.payload, self._slot(action)] = tensor

    # --- computing ----------------------------------------------------------------------------------------------

    def _run(self, action: Action, batch: PackedBatch, given: _Input | None) -> torch.Tensor:
        """Forward a stage; None: data of the microbatch enter there."""
        if action.module is StageModule.ENCODER:
            images = self._images(batch, action.microbatch, action.sub_microbatch)
            vision = self._model.vision[action.stage]
            inputs = images.pixels if given is None else given.tensor
            if not images.sizes and not vision.is_trained:
                return self._empty(action, batch)
            output: torch.Tensor = vision(inputs, images.sizes, memory=action.memory)
            return output
        module, kwargs = self._model.backbone[action.stage], batch.forward_kwargs()
        hidden = None if given is None else given.tensor
        if module.is_first_stage and given is not None:
            assert len(given.tensor) == len(batch.feature_index), "feature rows and image tokens differ in number"
            kwargs["features"], hidden = given.tensor, None
        self._row_losses = None
        if self._keeps_row_losses and self._loss_scale is not None and module.is_last_stage and batch.num_target_tokens:
            self._row_losses = torch.empty(batch.num_target_tokens, device=self._group.device)
            kwargs["row_losses"] = self._row_losses
        output = module(**kwargs, hidden=hidden, memory=action.memory)
        return output

    def _empty(self, action: Action, batch: PackedBatch) -> torch.Tensor:
        """What a stage hands on without images."""
        shape = self._shape(self._places[action.module, action.stage], action, batch)
        return torch.empty(shape, dtype=self._dtype, device=self._group.device)

    def _input(self, slot: _Slot, training: bool) -> _Input | None:
        """What the stage before has handed on, joined; None if data enter at this stage."""
        place, microbatch, part = slot
        if place == 0:
            return None
        whole = self._received.pop((Payload.ACTIVATION, slot), None)
        if whole is not None:
            given = _Input(whole, ((part, len(whole)),))
        else:
            names = range(self._num_parts[microbatch])
            tensors = [self._received.pop((Payload.ACTIVATION, (place, microbatch, name))) for name in names]
            given = _Input(torch.cat(tensors), tuple(zip(names, map(len, tensors), strict=True)))
        if training and self._flow[place - 1].has_backward and place > self._model.first_trained:
            given.tensor.requires_grad_()
        return given

    def _gradient(self, slot: _Slot, output: torch.Tensor) -> torch.Tensor:
        """What the stage after has handed back; zeros for a stage that, as all before it, has nothing to train."""
        gradient = self._received.pop((Payload.GRADIENT, slot))
        return gradient if slot[0] >= self._model.first_trained else output.new_zeros(()).expand_as(output)

    def _nothing(self) -> torch.Tensor:
        """In place of a gradient that nobody needs: one number, so that schedules need not know what is frozen."""
        return torch.zeros(1, dtype=self._dtype, device=self._group.device)

    def _images(self, batch: PackedBatch, microbatch: int, part: int | None) -> ImageBatch:
        """The images of a microbatch or of a part of it; pixels only where the rank has them."""
        assert self._model.encoder is not None
        images = batch.images or ImageBatch(())
        if part is None:
            return images
        patches = list(map(self._model.encoder.shape.num_patches, images.sizes))
        mine = image_parts(patches, self._num_parts[microbatch])[part]
        return ImageBatch(images.sizes[mine.start : mine.stop], images.pixels[mine.start : mine.stop])

    # --- handing on ---------------------------------------------------------------------------------------------

    def _slot(self, action: Action) -> _Slot:
        return self._places[action.module, action.stage], action.microbatch, action.sub_microbatch

    def _hand_on(self, payload: Payload, slot: _Slot, tensor: torch.Tensor) -> None:
        """Keep a result for the transfer that sends it, or for the neighbouring stage if this rank has that too."""
        place, microbatch, part = slot
        neighbour = place + (1 if payload is Payload.ACTIVATION else -1)
        if self._flow[neighbour].rank == self._group.pp_rank:
            self._received[payload, (neighbour, microbatch, part)] = tensor
        else:
            self._outgoing[payload, slot] = tensor

    def _tensor_of(self, action: Action, batch: PackedBatch) -> torch.Tensor:
        assert action.payload is not None
        slot = self._slot(action)
        if action.kind is ActionKind.ISEND:
            return self._outgoing.pop((action.payload, slot)).contiguous()
        if action.payload is Payload.GRADIENT and slot[0] < self._model.first_trained:
            return self._nothing()
        producer = slot[0] - (1 if action.payload is Payload.ACTIVATION else 0)
        return torch.empty(self._shape(producer, action, batch), dtype=self._dtype, device=self._group.device)

    def _shape(self, producer: int, action: Action, batch: PackedBatch) -> tuple[int, ...]:
        """Shape of what the stage at a place of the flow hands on, and of its gradient."""
        if self._flow[producer].module is StageModule.BACKBONE:
            own = self._model.backbone[action.stage]
            return 1, own.hidden_tokens(len(batch.input_ids)), self._model.hidden_size
        assert self._model.encoder is not None
        shape = self._model.encoder.shape
        is_last = self._flow[producer + 1].module is StageModule.BACKBONE
        sizes = self._images(batch, action.microbatch, action.sub_microbatch).sizes
        length = sum(map(shape.num_rows if is_last else shape.num_tokens, sizes))
        return length, shape.feature_width if is_last else shape.width_after(self._flow[producer].layers.stop)

    def _timed(self, name: str, action: Action, batch: PackedBatch) -> AbstractContextManager[None]:
        if not self.spans.is_on:
            return nullcontext()
        return self.spans.span(name, **span_args(name, action, batch, self._group.tp_rank))


def span_args(name: str, action: Action, batch: PackedBatch, tp_rank: int) -> dict[str, Any]:
    """Return what the trace says of a stage's work; the forward of the first stage consumes the features.

    Images are counted only where ranks compute their features: elsewhere none enter, which would read as a fault.
    """
    is_first = action.module is StageModule.BACKBONE and action.stage == 0 and tp_rank == 0
    return {
        "consumes": batch.positions if is_first and name == "forward" else (),
        "microbatch": action.microbatch,
        "module": action.module.value,
        "stage": action.stage,
        "num_tokens": batch.num_tokens,
        **({} if batch.images is None else {"images": len(batch.images.sizes)}),
    }
