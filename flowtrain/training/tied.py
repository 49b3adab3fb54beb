"""Tied embeddings that the pipeline puts into different stages: the first stage's embedding and the last one's head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flowtrain.models.parallel_layers import local_shard
from flowtrain.pipeline.actions import StageModule
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import PP_AXIS, BackboneGroup


class TiedEmbeddings:
    """Keeps the two copies equal: both get the sum of their gradients, so the optimizers of both apply the same update.

    Both are sharded in the same way over replicas and tensors, so each rank exchanges its shard with one other rank,
    or has both.
    copies: names of this rank's parameters whose values another rank has under their first name.
    """

    def __init__(self, model: ModelChunks, group: BackboneGroup) -> None:
        self._process_group = group.mesh.get_group(PP_AXIS)
        self._parameters: list[nn.Parameter] = []
        self._peer = group.rank
        self.copies: frozenset[str] = frozenset()
        stages = model.partition.of_module(StageModule.BACKBONE)
        first, last = stages[0].rank, stages[-1].rank
        if len(stages) == 1 or not model.tied or group.pp_rank not in (first, last):
            return
        ((copy, original),) = model.tied.items()
        if group.pp_rank == last:
            self.copies = frozenset({copy})
        self._peer = group.pipeline_peer(last if group.pp_rank == first else first)
        names = [name for name, rank in ((original, first), (copy, last)) if rank == group.pp_rank]
        own = dict(model.named_parameters())
        self._parameters = [own[name] for name in names if own[name].requires_grad]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace both gradients by their sum; a collective of the first and the last stage's ranks."""
        if not self._parameters:
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert len(gradients) == len(self._parameters), "embedding and head run in every microbatch"
        own, *others = map(local_shard, gradients)
        if others:  # both stages are on this rank
            own.add_(others[0])
            others[0].copy_(own)
            return
        theirs = torch.empty_like(own)
        transfers = [
            dist.P2POp(dist.isend, own.contiguous(), self._peer, self._process_group),
            dist.P2POp(dist.irecv, theirs, self._peer, self._process_group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        # Addition commutes exactly, so both ranks get the same bits.
        own.add_(theirs)
