"""Compares what was found of a cluster, and Ray's counts of it, with what a run needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

import ray

from flowtrain.allocator.plan import requirements
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.actor_specs import actor_specs_of, bundles_of
from flowtrain.controller.doctor.cluster_checks import clocks, locked_memory, models, pairs, shared_files, versions
from flowtrain.controller.doctor.probes import existing
from flowtrain.controller.doctor.report import Check, DoctorReport, NodeReport
from flowtrain.controller.mps import without_mps_text
from flowtrain.controller.prepare import RunSpec, check_memory
from flowtrain.costs.start_limit import RESUMED_NBYTES
from flowtrain.errors import ConfigError, ResourceError
from flowtrain.mempool.probe import slow_links
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.run_dir import run_dir
from flowtrain.types.memory import Link
from flowtrain.types.run_plan import Plan

PLACES = "actors fit the nodes"


def judge(run_spec: RunSpec, nodes: Sequence[NodeReport], links: Sequence[Link]) -> DoctorReport:
    """Compare what was found with what the run needs."""
    config = run_spec.config
    plan = run_spec.plan if any(node.num_devices for node in nodes) else run_spec.plan.without_devices()
    segments = [spec.segment_nbytes for spec in actor_specs_of(plan)]
    resources, may_spread = _resources(config, plan)
    checks = [_step(run_spec), resources]
    if resources.fits:
        checks.append(_places(plan) if may_spread else Check(PLACES, True, "all on one node"))
    checks += [
        _node_memory(nodes, segments, may_spread),
        pairs(links, nodes, may_spread),
        locked_memory(nodes, max(segments), may_spread),
        shared_files(nodes, str(run_dir(config).root)),
        _disk(run_spec),
        models(nodes),
        clocks(nodes),
        versions(nodes),
    ]
    warnings = (*slow_links(links), *_little_locked_memory(nodes, max(segments)), *_no_mps(config, nodes))
    return DoctorReport(config.name, sum(segments), tuple(nodes), tuple(links), tuple(checks), warnings)


def _step(run_spec: RunSpec) -> Check:
    name, config = "a step fits the pool", run_spec.config
    try:
        run_spec.feeder_need.check(run_spec.plan.feeder.segment_nbytes, config.pool.max_segment_nbytes)
        check_memory(config, family_from_config(config), run_spec.num_eval)
    except ConfigError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"a worst-case step of {config.training.global_batch_size} samples fits its segments")


def _resources(config: RunConfig, plan: Plan) -> tuple[Check, bool]:
    """Check what Ray counts; also returns whether the actors may be on several nodes."""
    name, needs = "the cluster has the resources", requirements(plan)
    try:
        strategy = cluster.check_resources(bundles_of(actor_specs_of(plan)), needs.pool_nbytes, config.pool.network)
    except ResourceError as error:
        return Check(name, False, str(error)), False
    detail = f"{needs.num_actors} actors with {needs.num_cpus:g} CPUs and {needs.num_devices:g} devices"
    return Check(name, True, detail), strategy != "STRICT_PACK"


def _places(plan: Plan) -> Check:
    """Check that each group of actors finds a node: counts of the whole cluster do not show that."""
    bundles = bundles_of(actor_specs_of(plan))
    nodes = {str(node["NodeID"]): dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    placed, left = cluster.place(bundles, nodes)
    if left is not None:
        return Check(
            PLACES,
            False,
            f"no node has {cluster.counts_text(left)} left after {sum(placed.values())} of {len(bundles)} groups of "
            "actors; the ranks of a tensor parallel group share a node: make a plan with the cluster's --nodes and "
            "--devices, or change tensor_parallel_size or num_cpus",
        )
    most = max(placed.values(), default=0)
    where = f"{len(placed)} of {len(nodes)} nodes, at most {most} on one"
    return Check(PLACES, True, f"{len(bundles)} groups of actors on {where}")


def _node_memory(nodes: Sequence[NodeReport], segments: Sequence[int], may_spread: bool) -> Check:
    """Check that the segments have room: all on one node, or spread over nodes if the network joins them."""
    available = [node.memory.available_nbytes for node in nodes]
    most, pool_nbytes = max(available), sum(segments)
    if may_spread:
        fits = pool_nbytes <= sum(available) and max(segments) <= most
        room = f"{len(nodes)} nodes have {sum(available)} bytes available, {most} of them on one"
    else:
        fits = pool_nbytes <= most
        room = f"node {nodes[available.index(most)].name} has {most} bytes available"
    detail = f"segments of {pool_nbytes} bytes in all; {room}"
    return Check("there is memory for it", fits, detail if fits else f"{detail}; {cluster.POOL_WAYS_OUT}")


def _disk(run_spec: RunSpec) -> Check:
    """Check the room for all kept checkpoints and the one being written."""
    config = run_spec.config
    if config.emulation is not None:
        return Check("checkpoints have room", True, "none are written: model.device is 'emulated'")
    others = 1 if config.checkpoint.keep_best is None else 2
    count = config.checkpoint.keep + others
    one = RESUMED_NBYTES * run_spec.model_spec.num_trainable_parameters(config.frozen_modules)
    root = run_dir(config).root
    free = shutil.disk_usage(existing(root)).free
    detail = f"{count} checkpoints of about {one} bytes (checkpoint.keep + {others}); {free} bytes are free at {root}"
    way_out = "; free some, lower checkpoint.keep, or set runs_dir to a larger disk"
    fits = count * one <= free
    return Check("checkpoints have room", fits, detail if fits else detail + way_out)


def _no_mps(config: RunConfig, nodes: Sequence[NodeReport]) -> Iterator[str]:
    """Warn of nodes whose devices encoders and ranks would use in turns."""
    lacking = [node.name for node in nodes if node.facts.lacks_mps and node.num_devices]
    if config.mode == "colocated" and config.model.device == "auto" and lacking:
        yield without_mps_text(lacking)


def _little_locked_memory(nodes: Sequence[NodeReport], segment_nbytes: int) -> Iterator[str]:
    """Warn if the limit on locked memory is too low to page-lock a segment."""
    for node in nodes:
        limit = node.memory.memlock_nbytes
        if node.num_devices and limit is not None and limit < segment_nbytes:
            yield (
                f"node {node.name} lets a process lock {limit} bytes (ulimit -l), a segment has {segment_nbytes}: "
                "raise memlock in /etc/security/limits.conf, or RDMA fails or is slow"
            )
