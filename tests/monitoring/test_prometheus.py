"""A real Prometheus on a real run, on a cluster with token authentication: every query has data, and an alert fires."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowtrain.config.load import dump_resolved
from flowtrain.config.run import RunConfig
from tests.e2e.clusters import BIN, Cluster, cluster, wait_until
from tests.e2e.worlds import World, tiny_config
from tests.monitoring.prometheus import Prometheus, needs_prometheus, prometheus
from tests.monitoring.queries import DASHBOARD, MONITORING, RULES, Query, panel_queries, rule_queries

pytestmark = [needs_prometheus, pytest.mark.e2e, pytest.mark.nightly]

WINDOW, FOR, SCRAPED = "20s", "4s", "2s"
"""The shipped rules look at minutes, so that a moment is no alarm; promtool tests them as they are."""
LIMIT_S = 240.0
ACTORS = {"coordinator", "feeder-0", "encoder-0", "backbone-dp0-pp0-tp0"}
GRAFANA = Path("session_latest/metrics/grafana/provisioning/dashboards/default.yml")


def hurried(expr: str) -> str:
    """A rule's expression that looks at seconds."""
    return re.sub(r"\[\d+m\]", f"[{WINDOW}]", expr)


def write_config(directory: Path, targets: Path) -> Path:
    """The shipped configuration and rules, in a hurry, for the targets of one cluster."""
    groups = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in groups["groups"] for rule in group["rules"]):
        rule |= {"expr": hurried(rule["expr"]), "for": FOR}
    (directory / RULES.name).write_text(yaml.safe_dump(groups))
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPED, "scrape_timeout": SCRAPED, "evaluation_interval": SCRAPED}
    config["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(targets)]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def starved_run(directory: Path) -> RunConfig:
    """Its encoder is hundreds of times larger than its backbone."""
    world, held_out = World(), World(seed=1)
    world.add_mixed(64)
    held_out.add_mixed(8)
    sources = [{"name": name, "path": str(world.write(directory / f"{name}.parquet"))} for name in ("one", "two")]
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 8}
    held_out.write(directory / "held_out.parquet")
    return tiny_config(
        directory,
        directory / "one.parquet",
        "starved",
        *(f"encoders.vision.config.{key}={value}" for key, value in vision.items()),
        "encoders.vision.data_parallel_size=1",
        "encoders.vision.segment_nbytes=16777216",  # its features are wide
        data={
            "sources": sources,
            "eval": {"path": str(directory / "held_out.parquet"), "every_steps": 4, "max_samples": 4},
        },
        training={"max_steps": 100_000},
        checkpoint={"every_steps": 8},
    )


def as_asked(query: Query) -> str:
    """A panel's query as Grafana sends it for all runs; a rule's with its comparisons as values, which always are."""
    panel = query.expr.replace("$__rate_interval", WINDOW).replace("$run", ".*")
    return re.sub(r" (==|!=|>=|<=|>|<) ", r" \1 bool ", hurried(panel))


def unanswered(server: Prometheus) -> set[str]:
    """Queries without data, and metrics that are in none of the answers because ``or`` hid them."""
    queries = [*panel_queries(), *rule_queries()]
    silent = {f"{query.where}: {query.expr}" for query in queries if not server.query(as_asked(query))}
    return silent | {name for query in queries for name in query.metrics if not server.query(f"count({name})")}


def test_every_query_has_data_and_a_starved_run_raises_its_alarm_alone(tmp_path: Path) -> None:
    dashboards = tmp_path / "dashboards"
    dashboards.mkdir()
    shutil.copy(DASHBOARD, dashboards)
    config = tmp_path / "job" / "starved.yaml"
    config.parent.mkdir()
    config.write_text(dump_resolved(starved_run(tmp_path)))
    variables = {"RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR": str(dashboards), "RAY_metrics_report_interval_ms": "3000"}
    with cluster(**variables) as own:
        check_grafana_gets_it(own, dashboards)
        wait_until(own.targets.exists, LIMIT_S, lambda: "Ray lists no targets")
        with (
            prometheus(write_config(tmp_path, own.targets), tmp_path) as server,
            own.following("starved", [str(BIN / "flowtrain"), "train", config.name], working_dir=config.parent) as job,
        ):

            def alarms() -> bool:
                assert job.is_running, job.report("the job ended early")
                return not unanswered(server) and "FlowTrainStarved" in server.firing()

            def problem() -> str:
                return job.report(f"firing: {server.firing()}, no data: {sorted(unanswered(server))}")

            wait_until(alarms, LIMIT_S, problem, poll_s=2.0)
            assert server.firing() == {"FlowTrainStarved"}
            assert any(target["health"] == "up" for target in server.targets())
            assert own.actor_names("flowtrain-starved") >= ACTORS, "Ray's dashboard shows them by name"
            own.jobs().stop_job("starved")
            job.wait()


def check_grafana_gets_it(own: Cluster, dashboards: Path) -> None:
    """Ray writes its dashboards beside ours, and has Grafana read the directory."""
    provisioning = own.temp_dir / GRAFANA
    rays = dashboards / "default_grafana_dashboard.json"
    wait_until(lambda: provisioning.is_file() and rays.is_file(), LIMIT_S, lambda: f"{provisioning} does not come")
    (provider,) = yaml.safe_load(provisioning.read_text())["providers"]
    assert provider["options"]["path"] == str(dashboards)
    assert (dashboards / DASHBOARD.name).read_text() == DASHBOARD.read_text()
