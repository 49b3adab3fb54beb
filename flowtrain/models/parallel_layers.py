"""Layers that compute on one tensor parallel rank's share, with plain tensors.

Their parameters are DTensors, or plain tensors that hold the local shard already. A module becomes such a layer by
taking over its class (as FSDP2 does), so that names, hooks and everything else about it stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_shard(parameter: Tensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of a parameter, through which gradients flow.

    grad_placements: how the gradient lies on the ranks, where it does not lie as the parameter does.
    """
    return parameter.to_local(grad_placements=grad_placements) if isinstance(parameter, DTensor) else parameter


def shard_bounds(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First row and the one behind the last that ``Shard(0)`` gives to this rank of a mesh of one axis."""
    each = -(-num_rows // mesh.size())
    start = min(num_rows, mesh.get_local_rank() * each)
    return start, min(num_rows, start + each)


def _sum_over_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    # Out of place: selective checkpointing keeps outputs of matrix products, which must not change afterwards.
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
    """Hand a replicated activation to computations that differ between ranks; its gradient is summed over them."""
    entered: Tensor = _EnterRegion.apply(tensor, mesh)
    return entered


def leave_region(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the ranks' partial results to a replicated activation; each of them gets its gradient as it is."""
    left: Tensor = _LeaveRegion.apply(tensor, mesh)
    return left


class ColwiseLinear(nn.Linear):
    """Has rows of the weight: a share of the output's features, from inputs that are the same on all ranks.

    enters_region: False where the module around it lets its input into the region, once for several layers.
    """

    tp_mesh: DeviceMesh
    enters_region = True

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in]``, replicated, to ``[..., out / ranks]``."""
        if self.enters_region:
            input = enter_region(input, self.tp_mesh)
        bias = None if self.bias is None else local_shard(self.bias)
        return nn.functional.linear(input, local_shard(self.weight), bias)


class RowwiseLinear(nn.Linear):
    """Has columns of the weight: the output's partial sums from a share of the input's features."""

    tp_mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in / ranks]`` to ``[..., out]``, replicated."""
        output = leave_region(nn.functional.linear(input, local_shard(self.weight)), self.tp_mesh)
        return output if self.bias is None else output + local_shard(self.bias)


class VocabularyParallelEmbedding(nn.Embedding):
    """Has some tokens' rows of the weight; the others' are zeros here and come from other ranks."""

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
    """Derive a class whose forward sees this rank's part of its own parameters under their names, whatever it does.

    For modules that compute the same on every rank or, with gradients that lie otherwise, on heads of each rank's own.
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
