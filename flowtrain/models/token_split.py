"""Sequence parallelism (Korthikanti et al., 2022, section 4.2.2): between regions a rank has its slice of the tokens.

A slice has ``ceil(T / ranks)`` tokens. Rows past the T-th are padding: no token attends to them, the loss does not see
them, and their gradients are zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# Newer torch warns about the old names.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""For gloo, where the functional gather crashed once in some hours of steps (torch 2.13): the two threads of a group
write down what they did last without a lock, and that gather's name, ALLGATHER_COALESCED, is too long to be stored in
place. One thread frees it while the other writes a shorter name there. Compiled layers still use it."""


def slice_length(num_tokens: int, num_ranks: int) -> int:
    """Tokens of each rank's slice, padding included."""
    return -(-num_tokens // num_ranks)


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.num_tokens = mesh, whole.shape[-2]
        return _own_slice(whole, mesh)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_output, ctx.mesh, ctx.num_tokens), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
        ctx.mesh = mesh
        return _gather(own, mesh, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(grad_output, ctx.mesh), None, None


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
        ctx.mesh = mesh
        return _gather(own, mesh, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_sums(grad_output, ctx.mesh), None, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.num_tokens = mesh, partial.shape[-2]
        return _scatter_sums(partial, mesh)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_output, ctx.mesh, ctx.num_tokens), None


def split_tokens(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take this rank's slice ``[1, ceil(T / ranks), H]`` of hidden states ``[1, T, H]`` that all ranks have.

    This and the functions below work without the first axis too; it must be 1, since slices are of one row.
    """
    own: Tensor = _SplitTokens.apply(whole, mesh)
    return own


def join_tokens(own: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """Gather all slices to ``[1, T, H]`` for a computation that is the same on all ranks."""
    whole: Tensor = _JoinTokens.apply(own, mesh, num_tokens)
    return whole


def enter_split_region(own: Tensor, mesh: DeviceMesh, num_tokens: int | None) -> Tensor:
    """Gather all slices for computations that differ between ranks; the gradient is summed and split again.

    num_tokens: T; None leaves the padding in, for a region that computes each token on its own.
    """
    if num_tokens is None:
        num_tokens = own.shape[-2] * mesh.size()
    entered: Tensor = _EnterRegion.apply(own, mesh, num_tokens)
    return entered


def leave_split_region(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the ranks' partial results ``[1, T, H]`` and keep this rank's slice."""
    left: Tensor = _LeaveRegion.apply(partial, mesh)
    return left


def _gather(own: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """All slices, without the padding after ``num_tokens``."""
    rows = own.flatten(0, -2).contiguous()
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        whole = rows.new_empty(mesh.size() * len(rows), rows.shape[-1])
        _gather_into(whole, rows, group=mesh.get_group())
    else:
        whole = collectives.wait_tensor(_all_gather(rows, 0, (mesh, 0)))
    return whole.view(*own.shape[:-2], -1, own.shape[-1]).narrow(-2, 0, num_tokens)


def _scatter_sums(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    padded = _padded(partial, mesh).flatten(0, -2).contiguous()
    own = collectives.wait_tensor(_reduce_scatter(padded, "sum", 0, (mesh, 0)))
    return own.view(*partial.shape[:-2], -1, partial.shape[-1])


def _own_slice(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    length = slice_length(whole.shape[-2], mesh.size())
    # A copy: a view would keep the whole tensor in memory.
    return _padded(whole, mesh).narrow(-2, mesh.get_local_rank() * length, length).clone()


def _padded(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    missing = -whole.shape[-2] % mesh.size()
    return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole
