"""Encoder ranks: they hold a part of a split vision tower and only forward it. Also what they share with the leader."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from flowtrain.actors.cores import giving_way
from flowtrain.config.run import RunConfig
from flowtrain.models.device import opened_device
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import unchecked_family
from flowtrain.models.tower_plans import parallelize_tower
from flowtrain.training.tower_group import TowerGroup


def rank_name(leader: str, rank: int) -> str:
    """Return the name of a rank's actor. The leader is rank 0 and has the replica's name."""
    return f"{leader}-tp{rank}" if rank else leader


def join_replica(
    config: RunConfig, encoder: str, leader: str, rank: int, port: int, listener: socket.socket | None = None
) -> TowerGroup:
    """Meet the other ranks of a replica at the leader's port. Raises StallError when they do not come."""
    size = config.encoders[encoder].tensor_parallel_size
    return TowerGroup(
        [rank_name(leader, each) for each in range(size)],
        rank,
        opened_device(config.model.device),
        port=port,
        listener=listener,
        start_timeout_s=config.limits.start_limit_s,
        stall_timeout_s=config.limits.stall_timeout_s,
    )


def load_split(family: Family, encoder: str, group: TowerGroup) -> VisionEncoder:
    """Load a tower and keep this rank's part of it, on the CPU."""
    module = family.load_encoder(encoder)
    parallelize_tower(module.tower, group.mesh, f"encoders.{encoder}")
    return module


class EncoderRank:
    """A rank of an encoder replica's tensor parallel group other than the leader (``Encoder``).

    It does not lease, decode or use the pool. It waits for the batches that the leader forwards, forwards its part of
    the tower over them, and ends with the leader.

    encoder: name of the encoder in the configuration.
    leader: name of the leader's actor.
    rank: place in the group, from 1.
    """

    def __init__(self, config: RunConfig, encoder: str, leader: str, rank: int) -> None:
        self._config = config
        self._encoder = encoder
        self._leader = leader
        self._rank = rank

    def run(self, port: int) -> None:
        """Forward with the leader until it wants no more. port: where the leader listens on this node.

        Raises ReplicaLostError when another rank is gone, StallError when ranks do not come.
        """
        torch.set_num_threads(self._config.encoders[self._encoder].num_threads)
        device = opened_device(self._config.model.device)
        with giving_way(self._config, device):
            family = unchecked_family(self._config)
            group = join_replica(self._config, self._encoder, self._leader, self._rank, port)
            module = load_split(family, self._encoder, group).to(device)
            while (images := group.receive(module.tower.dtype)) is not None:
                with group.forwarding():
                    self.forward(module, *images)
            group.close()

    def forward(self, module: VisionEncoder, pixels: torch.Tensor, shapes: Sequence[Sequence[int]]) -> None:
        """Do this rank's part of a forward; the features come out on the leader."""
        module(pixels, shapes)
