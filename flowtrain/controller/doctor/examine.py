"""What a cluster has for a run: nodes, transports as measured, and whether the run can start there."""

from __future__ import annotations

from dataclasses import replace

import ray

from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.doctor.checks import judge
from flowtrain.controller.doctor.links import measure
from flowtrain.controller.doctor.probes import describe, probes
from flowtrain.controller.doctor.report import Check, DoctorReport
from flowtrain.controller.planning.report import PlanReport
from flowtrain.controller.prepare import prepare
from flowtrain.models.hub import hub_models
from flowtrain.observability.run_dir import run_dir


def examine(config: RunConfig, planning: PlanReport | None = None) -> DoctorReport:
    """Look at the cluster that the run would use; starts a local one if ``RAY_ADDRESS`` names none.

    planning: the plan that ``mode: auto`` made; None if there was nothing to choose.
    Raises ConfigError or DataError if the run could not work on any cluster, ResourceError if none answers.
    """
    run_spec = prepare(config, check_pool=False)
    limit_s = config.limits.start_limit_s
    with cluster.connected(config):
        found = [node for node in ray.nodes() if node["Alive"]]
        with probes(found, config.pool.network != "none") as pairs:
            nodes = describe(found, pairs, run_dir(config).root, hub_models(config), limit_s)
            links = measure(nodes, pairs, limit_s)
        report = judge(run_spec, nodes, links)
        return report if planning is None else replace(report, checks=(_chosen(planning), *report.checks))


def _chosen(planning: PlanReport) -> Check:
    winner = planning.winner
    detail = (
        f"{winner.mode} on {winner.devices} of {planning.cluster.num_devices} devices, "
        f"{rate_text(planning.rate)} samples/s"
    )
    return Check("mode auto has a plan", True, f"{detail}: {winner.reason}")
