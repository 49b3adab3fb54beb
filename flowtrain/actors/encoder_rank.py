"""What the ranks of an encoder replica have in common, and the ranks that only forward their part of the tower."""

from __future__ import annotations

import socket

import torch

from flowtrain.config.run import RunConfig
from flowtrain.models.device import default_device
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.tower_plans import parallelize_tower
from flowtrain.training.tower_group import TowerGroup


def rank_name(leader: str, rank: int) -> str:
    """Name of a rank's actor; the leader, which has the replica's name, is rank 0."""
    return f"{leader}-tp{rank}" if rank else leader


def join_replica(
    config: RunConfig, encoder: str, leader: str, rank: int, port: int, listener: socket.socket | None = None
) -> TowerGroup:
    """Meet the other ranks of a replica at the leader's port; raises StallError when they do not come."""
    size = config.encoders[encoder].tensor_parallel_size
    return TowerGroup(
        [rank_name(leader, each) for each in range(size)],
        rank,
        default_device(config.model.device),
        port=port,
        listener=listener,
        start_timeout_s=config.limits.start_timeout_s,
        stall_timeout_s=config.limits.stall_timeout_s,
    )


def load_split(family: Family, encoder: str, group: TowerGroup) -> VisionEncoder:
    """Load a tower and keep this rank's part of it, on the CPU."""
    module = family.load_encoder(encoder)
    parallelize_tower(module.tower, group.mesh, f"encoders.{encoder}")
    return module


class EncoderFollower:
    """A rank of an encoder replica's tensor parallel group other than the leader (``Encoder``).

    It has no part in leasing, decoding or the pool: it waits for batches that the leader forwards, forwards them too,
    and ends with it. leader: the name of the leader's actor.
    """

    def __init__(self, config: RunConfig, encoder: str, leader: str, rank: int) -> None:
        self._config = config
        self._encoder = encoder
        self._leader = leader
        self._rank = rank

    def run(self, port: int) -> None:
        """Forward with the leader, which listens on ``port`` of this node, until it wants no more.

        Raises ReplicaLostError when another rank is gone, StallError when ranks do not come.
        """
        torch.set_num_threads(self._config.encoders[self._encoder].num_threads)
        family = family_from_config(self._config)
        group = join_replica(self._config, self._encoder, self._leader, self._rank, port)
        module = load_split(family, self._encoder, group).to(default_device(self._config.model.device))
        while (batch := group.receive(module.tower.dtype)) is not None:
            with group.forwarding():
                self.forward(module, batch)
        group.close()

    def forward(self, module: VisionEncoder, batch: torch.Tensor) -> None:
        """Do this rank's part of a forward; the features come out on the leader."""
        module(batch)
