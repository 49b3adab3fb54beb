"""What follows a step that is not finite, and whether weights are finite."""

from __future__ import annotations

import enum
import math
from typing import Literal

import torch
import torch.distributed as dist

from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.mesh import BackboneGroup

MAX_REWINDS = 3
"""Rewinds to one checkpoint; after so many, its successor is out of reach."""


class Reaction(enum.Enum):
    """What a run does next."""

    GO_ON = enum.auto()
    REWIND = enum.auto()
    STOP = enum.auto()


class NonFinitePolicy:
    """Counts steps that are not finite, and decides by ``training.on_nonfinite`` and ``training.max_skipped_steps``.

    It gets global values only, so all ranks decide the same. Every run starts to count anew, a resumed one too.
    """

    def __init__(self, on_nonfinite: Literal["skip", "stop", "rewind"], max_skipped_steps: int) -> None:
        self._on_nonfinite = on_nonfinite
        self._max_skipped_steps = max_skipped_steps
        self._has_rewound = False  # since the last finite step
        self._rewinds: dict[int, int] = {}
        self.streak = 0
        """Steps in a row that were not finite, since the last rewind."""

    def after_step(self, is_finite: bool) -> Reaction:
        """Decide what follows a step. A rewind must then be allowed by ``may_rewind_to``."""
        if is_finite:
            self.streak, self._has_rewound = 0, False
            return Reaction.GO_ON
        self.streak += 1
        if self._on_nonfinite == "stop":
            return Reaction.STOP
        if self.streak <= self._max_skipped_steps:
            return Reaction.GO_ON
        if self._on_nonfinite == "skip" or self._has_rewound:
            return Reaction.STOP
        return Reaction.REWIND

    def may_rewind_to(self, checkpoint: int | None) -> bool:
        """Whether to go back to the last checkpoint, given by its step; None: there is none. Counts the rewind."""
        if checkpoint is None or self._rewinds.get(checkpoint, 0) >= MAX_REWINDS:
            return False
        self._rewinds[checkpoint] = self._rewinds.get(checkpoint, 0) + 1
        self.streak, self._has_rewound = 0, True
        return True


@torch.no_grad()
def state_is_finite(optimizer: torch.optim.Optimizer, group: BackboneGroup) -> bool:
    """Whether the trained weights and their optimizer state are finite on all ranks; collective."""
    trained = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    states = [value for parameter in trained for value in optimizer.state.get(parameter, {}).values()]
    shards = [local_shard(tensor) for tensor in (*trained, *states) if isinstance(tensor, torch.Tensor) and tensor.ndim]
    flag = torch.tensor([float(_are_finite([shard for shard in shards if shard.numel()]))])
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group.process_group)
    return bool(flag)


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    """One pass over healthy tensors. Large numbers can make a norm infinite, so such a tensor gets a closer look."""
    if not tensors:
        return True
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)]).tolist()
    suspects = [tensor for tensor, norm in zip(tensors, norms, strict=True) if not math.isfinite(norm)]
    return all(bool(tensor.isfinite().all()) for tensor in suspects)
