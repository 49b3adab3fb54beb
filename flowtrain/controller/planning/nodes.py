"""What a plan needs because its devices are on several nodes."""

from __future__ import annotations

from dataclasses import replace

from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.config.run import RunConfig
from flowtrain.costs.cluster import Cluster
from flowtrain.types.run_plan import Plan


def nodes_needed(rating: ModeRating, cluster: Cluster) -> int:
    """Return the fewest nodes that have a plan's devices; a node has devices of one type."""
    if rating.devices == 1:
        return 1
    used = dict.fromkeys(cluster.counts, 0)
    for module in rating.modules[-1:] if rating.mode == "colocated" else rating.modules:
        used[module.device_type] += module.devices
    return sum(-(-used[each.name] // each.devices_per_node) for each in cluster.device_types)


def with_network(plan: Plan, config: RunConfig, num_nodes: int) -> Plan:
    """Return the plan with a network between its nodes, if it needs several and the configuration has none."""
    if num_nodes > 1 and config.pool.network == "none":
        return replace(plan, network="auto")
    return plan


def network_note(plan: Plan, config: RunConfig, num_nodes: int) -> str | None:
    """Return what to know about the ports between nodes; None if the plan needs one node."""
    if num_nodes < 2:
        return None
    network = plan.network or config.pool.network
    return (
        f"the plan needs {num_nodes} nodes, which the memory pool joins by NIXL (pool.network: {network}): UCX opens "
        "ports that ask for no token; keep the network between the nodes private, and name its interface in "
        "UCX_NET_DEVICES where `ray start` runs; flowtrain doctor --plan checks the cluster"
    )
