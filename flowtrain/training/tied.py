"""Tied embeddings that the pipeline puts on different ranks: the first stage's embedding and the last one's head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import PP_AXIS, BackboneGroup


class TiedEmbeddings:
    """Keeps the two copies equal: both get the sum of their gradients, so the optimizers of both apply the same update.

    Both are sharded in the same way over replicas and tensors, so each rank exchanges its shard with one other rank.
    copies: names of this rank's parameters whose values another rank has under their first name.
    """

    def __init__(self, model: ModelChunks, group: BackboneGroup) -> None:
        self._process_group = group.mesh.get_group(PP_AXIS)
        self._parameter: nn.Parameter | None = None
        self._peer = group.pipeline_peer(0)
        self.copies: frozenset[str] = frozenset()
        last = group.degrees.pp - 1
        if last == 0 or not model.tied or group.pp_rank not in (0, last):
            return
        ((copy, original),) = model.tied.items()
        own = dict(model.named_parameters())
        if group.pp_rank == 0:
            self._peer = group.pipeline_peer(last)
        else:
            self.copies = frozenset({copy})
        parameter = own[original if group.pp_rank == 0 else copy]
        self._parameter = parameter if parameter.requires_grad else None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace both gradients by their sum; a collective of the first and the last stage's ranks."""
        if self._parameter is None:
            return
        assert self._parameter.grad is not None, "embedding and head run in every microbatch"
        own = local_shard(self._parameter.grad)
        theirs = torch.empty_like(own)
        transfers = [
            dist.P2POp(dist.isend, own.contiguous(), self._peer, self._process_group),
            dist.P2POp(dist.irecv, theirs, self._peer, self._process_group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        # Addition commutes exactly, so both ranks get the same bits.
        own.add_(theirs)
