"""How many data parallel ranks hold one set of shards, by configuration."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.costs.training_setup import TrainingSetup


def num_shards(setup: TrainingSetup, dp: IntArray, replica_size: IntArray, devices_per_node: int) -> IntArray:
    """Return the DP ranks that share one set of shards, ``[C]``; 0 where hybrid sharding cannot form equal groups.

    Under ``hybrid`` without a ``shard_size``, these are the replicas of one node: nodes must hold equal numbers of
    them, and at least two, unless there is only one replica in all. replica_size: devices of one replica, ``[C]``.
    """
    if setup.sharding != "hybrid":
        return dp
    if setup.shard_size is not None:
        return np.where(dp % setup.shard_size == 0, setup.shard_size, 0)
    in_node = np.minimum(dp, devices_per_node // replica_size)
    fills_nodes = (devices_per_node % replica_size == 0) & (dp % np.maximum(in_node, 1) == 0)
    is_even = (in_node > 1) & ((in_node == dp) | fills_nodes)
    return np.where(dp == 1, 1, np.where(is_even, in_node, 0))
