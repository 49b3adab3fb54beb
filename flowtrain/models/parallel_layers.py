"""Layers that compute on one tensor parallel rank's share, with plain tensors.

Their parameters are DTensors, or plain tensors that already hold the local shard. A module becomes such a layer by a
change of its class (as in FSDP2), so that its names, hooks and attributes stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from flowtrain.models.token_split import leave_split_region


def local_shard(parameter: Tensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of a parameter; gradients flow through it.

    grad_placements: placements of the gradient, if they differ from the parameter's.
    """
    return parameter.to_local(grad_placements=grad_placements) if isinstance(parameter, DTensor) else parameter


def shard_bounds(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Bounds (start, stop) of the rows that ``Shard(0)`` gives to this rank of a mesh of one axis."""
    each = -(-num_rows // mesh.size())
    start = min(num_rows, mesh.get_local_rank() * each)
    return start, min(num_rows, start + each)


def _sum_over_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    # Out of place: selective checkpointing keeps outputs of matrix products, and they must not change afterwards.
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", (mesh, 0)))


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grad_output, ctx.mesh), None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum_over_ranks(tensor, mesh)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def enter_region(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Pass a replicated activation to computations that differ between ranks; its gradient is summed over the ranks."""
    entered: Tensor = _EnterRegion.apply(tensor, mesh)
    return entered


def leave_region(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the ranks' partial results to a replicated activation; each rank gets its gradient unchanged."""
    left: Tensor = _LeaveRegion.apply(tensor, mesh)
    return left


class ColwiseLinear(nn.Linear):
    """Has rows of the weight: a share of the output's features, from inputs that are the same on all ranks."""

    tp_mesh: DeviceMesh
    enters_region = True
    """False if the module around it enters the region, once for several layers."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in]``, replicated, to ``[..., out / ranks]``."""
        if self.enters_region:
            input = enter_region(input, self.tp_mesh)
        bias = None if self.bias is None else local_shard(self.bias)
        return nn.functional.linear(input, local_shard(self.weight), bias)


class FusedColumnsLinear(nn.Linear):
    """Computes a rank's share of the features of queries, keys and values, whose weights are one matrix.

    Each rank has the whole weight, since its share is no contiguous part of it, and uses the rows of its own heads.
    """

    tp_mesh: DeviceMesh
    enters_region = True
    """As of ``ColwiseLinear``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in]``, replicated, to ``[..., out / ranks]``."""
        if self.enters_region:
            input = enter_region(input, self.tp_mesh)
        # Each rank's gradient is that of its own rows, so it is a sum over the ranks.
        weight, bias = (
            None if whole is None else own_fused_rows(local_shard(whole, [Partial()]), self.tp_mesh)
            for whole in (self.weight, self.bias)
        )
        assert weight is not None
        return nn.functional.linear(input, weight, bias)


def own_fused_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a parameter ``[3 * out, ...]`` of queries, keys and values: ``[3 * out / ranks, ...]``."""
    parts = whole.unflatten(0, (3, -1))
    start, stop = shard_bounds(parts.shape[1], mesh)
    return parts[:, start:stop].flatten(0, 1)


class RowwiseLinear(nn.Linear):
    """Has columns of the weight: the output's partial sums from a share of the input's features."""

    tp_mesh: DeviceMesh
    splits_tokens = False
    """Whether its output is this rank's slice of the tokens (sequence parallelism)."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in / ranks]`` to ``[..., out]``, replicated; or ``[1, T, ...]``, ``[T, ...]`` to a slice of T."""
        partial = nn.functional.linear(input, local_shard(self.weight))
        if not self.splits_tokens:
            output = leave_region(partial, self.tp_mesh)
            return output if self.bias is None else output + local_shard(self.bias)
        output = leave_split_region(partial, self.tp_mesh)
        # Each rank adds the bias to other tokens, so its gradient is a sum over the ranks.
        return output if self.bias is None else output + local_shard(self.bias, [Partial()])


class VocabularyParallelEmbedding(nn.Embedding):
    """Has the weight's rows of some tokens; all other tokens are zeros here, and other ranks add their embeddings."""

    tp_mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """Embed token ids ``[...]``, the same on all ranks, to ``[..., H]``, replicated."""
        start, stop = shard_bounds(self.num_embeddings, self.tp_mesh)
        is_here = (input >= start) & (input < stop)
        padding = self.padding_idx
        embedded = nn.functional.embedding(
            torch.where(is_here, input - start, 0),
            local_shard(self.weight),
            padding_idx=padding - start if padding is not None and start <= padding < stop else None,
        )
        return leave_region(torch.where(is_here[..., None], embedded, 0.0), self.tp_mesh)


def with_local_parameters(
    module_class: type[nn.Module], grad_placements: Sequence[Placement] | None = None
) -> type[nn.Module]:
    """Derive a class whose forward sees this rank's part of its own parameters under the same names.

    For modules that compute the same on every rank. With other ``grad_placements``, for modules that each rank applies
    to its own heads or tokens.
    """

    class WithLocalParameters(module_class):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            whole = cast("dict[str, Tensor | None]", self._parameters)  # type: ignore[has-type]
            self._parameters = {
                name: None if parameter is None else local_shard(parameter, grad_placements)
                for name, parameter in whole.items()
            }
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._parameters = whole

    WithLocalParameters.__name__ = module_class.__name__
    return WithLocalParameters
