"""Which data parallel ranks share one set of shards under hybrid sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from flowtrain.config.model import BackboneConfig
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.plan import Degrees


def shard_size_of(backbone: BackboneConfig, addresses: Sequence[str]) -> int | None:
    """Return how many neighbouring data parallel ranks share one set of shards; None: all of them.

    addresses: of each backbone rank's node, by rank. Raises ConfigError if the replicas on one node shall share shards,
    and nodes have unequal numbers of neighbouring ones, or none.
    """
    if backbone.sharding != "hybrid" or backbone.hybrid_shard_size is not None:
        return backbone.hybrid_shard_size
    degrees = Degrees(backbone.data_parallel_size, backbone.pipeline_parallel_size, backbone.tensor_parallel_size)
    if degrees.dp == 1:
        return None
    runs = Counter(
        len(list(group))
        for pp_rank in range(degrees.pp)
        for tp_rank in range(degrees.tp)
        for _, group in groupby(addresses[degrees.rank(dp_rank, pp_rank, tp_rank)] for dp_rank in range(degrees.dp))
    )
    if len(runs) > 1:
        found = " and ".join(map(str, sorted(runs)))
        raise _refused(degrees, f"neighbouring replicas share a node in groups of {found}, which must be equal")
    (size,) = runs
    if size == 1:
        raise _refused(degrees, "no two neighbouring replicas share a node, so that nothing would be sharded")
    return size


def _refused(degrees: Degrees, what: str) -> ConfigError:
    sizes = ", ".join(str(size) for size in range(2, degrees.dp + 1) if degrees.dp % size == 0)
    return ConfigError.of(
        "backbone.hybrid_shard_size",
        FaultCode.DEGREES,
        f"backbone.hybrid_shard_size (not given) stands for the replicas on one node; of "
        f"backbone.data_parallel_size ({degrees.dp}) {what}; set backbone.hybrid_shard_size to one of {sizes}, or "
        "backbone.sharding (now 'hybrid') to 'full'",
    )
