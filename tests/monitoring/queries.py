"""The queries of the dashboard and of the alert rules, and the names that the code exports."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from flowtrain.observability.ray_sink import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, RUN_TAGS
from tests.e2e.worlds import ROOT

MONITORING = ROOT / "configs" / "monitoring"
DASHBOARD, RULES = MONITORING / "grafana_dashboard.json", MONITORING / "alert_rules.yml"

RAYS_PREFIX = "ray_"
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Query:
    """where: panel or alert, for messages."""

    where: str
    expr: str

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that it reads."""
        return set(re.findall(rf"\b{RAYS_PREFIX}{PREFIX}\w+", self.expr))


def exported_tags() -> dict[str, set[str]]:
    """Names that Prometheus sees, each with its labels of FlowTrain's."""
    names = {name: tags for name, (_, tags) in GAUGES.items()}
    names |= {f"{name}_total": tags for name, (_, tags) in COUNTERS.items()}
    names |= {f"{name}{suffix}": () for name in HISTOGRAMS for suffix in HISTOGRAM_SUFFIXES}
    return {f"{RAYS_PREFIX}{PREFIX}{name}": {*RUN_TAGS, *tags} for name, tags in names.items()}


def dashboard() -> dict[str, Any]:
    """The dashboard as it is shipped."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """The alert rules as they are shipped."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panel_queries() -> list[Query]:
    """Every query of the dashboard."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [Query(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def rule_queries() -> list[Query]:
    """The expression of every rule."""
    return [Query(rule["alert"], rule["expr"]) for rule in rules()]
