"""The likeliest next token, also from a head whose vocabulary is split over tensor parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain.models.parallel_layers import local_shard, shard_bounds


def greedy_tokens(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return the likeliest token after each row, int64 ``[n]``; the same on every tensor parallel rank.

    hidden: ``[n, H]``, the same on every tensor parallel rank. head: as for ``weighted_nll_sum``. A logit that is no
    number counts as the least likely.
    """
    weight, bias = local_shard(head.weight), None if head.bias is None else local_shard(head.bias)
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    best, tokens = logits.max(dim=1)
    if not isinstance(head.weight, DTensor):
        return tokens
    mesh, num_tokens = head.weight.device_mesh, len(head.weight)
    highest = best.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, mesh.get_group())
    # Of equally likely tokens the lowest, as on one rank.
    tokens = torch.where(best == highest, tokens + shard_bounds(num_tokens, mesh)[0], num_tokens)
    dist.all_reduce(tokens, dist.ReduceOp.MIN, mesh.get_group())
    return tokens
