"""1F1B: one forward, one backward, with as few microbatches in flight as the pipeline's depth asks."""

from __future__ import annotations

from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy, Payload


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, memory: MemoryStrategy = MemoryStrategy.KEEP
) -> tuple[tuple[Action, ...], ...]:
    """Action lists of all ranks, stage i on pipeline rank i.

    Rank i runs up to ``num_stages - 1 - i`` warm-up forwards, then alternates, then drains; one stage gives F0 B0 F1 B1
    ... Raises ValueError for fewer than one stage or a negative number of microbatches.
    """
    if num_stages < 1 or num_microbatches < 0:
        raise ValueError(f"num_stages ({num_stages}) must be at least 1 and num_microbatches ({num_microbatches}) 0")
    return tuple(_RankSchedule(stage, num_stages, memory).build(num_microbatches) for stage in range(num_stages))


def forward_only(num_microbatches: int) -> tuple[Action, ...]:
    """Action list of a single stage that evaluates: F0 F1 F2 ..."""
    return tuple(Action(ActionKind.FORWARD_STAGE, 0, k, memory=MemoryStrategy.KEEP) for k in range(num_microbatches))


class _RankSchedule:
    """Collects one rank's actions.

    A send and a receive between the same two ranks are launched side by side (Megatron's fused send-receive: the
    executor groups neighbouring launches), so that two unbuffered sends never face each other. A receive is waited for
    where its data is used, a send before the next one in its direction, so that it overlaps the computation between.
    """

    def __init__(self, stage: int, num_stages: int, memory: MemoryStrategy) -> None:
        self.stage, self.num_stages, self.memory = stage, num_stages, memory
        self.actions: list[Action] = []
        self.pending_sends: dict[Payload, int] = {}

    def build(self, num_microbatches: int) -> tuple[Action, ...]:
        num_warmup = min(self.num_stages - 1 - self.stage, num_microbatches)
        for k in range(num_warmup):
            self._receive(Payload.ACTIVATION, k)
            self._forward(k)
            self._send(Payload.ACTIVATION, k)
        if num_warmup < num_microbatches:
            self._receive(Payload.ACTIVATION, num_warmup)
        for backward, forward in enumerate(range(num_warmup, num_microbatches)):
            self._forward(forward)
            self._send(Payload.ACTIVATION, forward)
            self._receive(Payload.GRADIENT, backward)
            self._backward(backward)
            self._send(Payload.GRADIENT, backward)
            if forward + 1 < num_microbatches:
                self._receive(Payload.ACTIVATION, forward + 1)
        for backward in range(num_microbatches - num_warmup, num_microbatches):
            self._receive(Payload.GRADIENT, backward)
            self._backward(backward)
            self._send(Payload.GRADIENT, backward)
        for payload in tuple(self.pending_sends):
            self._wait_send(payload)
        return tuple(self.actions)

    def _forward(self, microbatch: int) -> None:
        self._wait_receive(Payload.ACTIVATION, microbatch)
        self.actions.append(Action(ActionKind.FORWARD_STAGE, self.stage, microbatch, memory=self.memory))

    def _backward(self, microbatch: int) -> None:
        self._wait_receive(Payload.GRADIENT, microbatch)
        self.actions.append(Action(ActionKind.BACKWARD_STAGE, self.stage, microbatch, memory=self.memory))

    def _send(self, payload: Payload, microbatch: int) -> None:
        if self._peer(payload, sending=True) is None:
            return
        self._wait_send(payload)
        self._transfer(ActionKind.ISEND, payload, microbatch)
        self.pending_sends[payload] = microbatch

    def _wait_send(self, payload: Payload) -> None:
        microbatch = self.pending_sends.pop(payload, None)
        if microbatch is not None:
            self._transfer(ActionKind.WAIT_ISEND, payload, microbatch)

    def _receive(self, payload: Payload, microbatch: int) -> None:
        if self._peer(payload, sending=False) is not None:
            self._transfer(ActionKind.IRECV, payload, microbatch)

    def _wait_receive(self, payload: Payload, microbatch: int) -> None:
        if self._peer(payload, sending=False) is not None:
            self._transfer(ActionKind.WAIT_IRECV, payload, microbatch)

    def _transfer(self, kind: ActionKind, payload: Payload, microbatch: int) -> None:
        peer = self._peer(payload, sending=kind in (ActionKind.ISEND, ActionKind.WAIT_ISEND))
        self.actions.append(Action(kind, self.stage, microbatch, peer=peer, payload=payload))

    def _peer(self, payload: Payload, *, sending: bool) -> int | None:
        """Activations go to the next stage, gradients to the one before; None beyond the ends."""
        peer = self.stage + (1 if sending == (payload is Payload.ACTIVATION) else -1)
        return peer if 0 <= peer < self.num_stages else None
