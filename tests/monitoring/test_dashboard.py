"""The Grafana dashboard and Prometheus' rules: their form, and that they name metrics and labels that exist."""

from __future__ import annotations

import enum
import json
import re
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import build_dashboard
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE
from ray.dashboard.modules.metrics import dashboards

from tests.e2e.worlds import ROOT
from tests.monitoring.queries import (
    MONITORING,
    Query,
    dashboard,
    exported_tags,
    panel_queries,
    rule_queries,
    rules,
)

QUERIES = [*panel_queries(), *rule_queries()]
every_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.where}-{len(query.expr)}")

VARIABLES = {"run", "__rate_interval", "datasource"}
RAYS_UIDS = re.compile(r'default_uid="(\w+)"')


# --- the schema: Grafana's own SDK, which is generated from it --------------------------------------------------------


def faults(value: Any, hint: Any, where: str = "dashboard") -> list[str]:
    """Where a value does not have the type that the schema gives it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, typing.TypeVar):  # options of a kind of panel, by their own class
        return _faults_of_class(value, type(value), where) if hasattr(value, "to_json") else []
    if origin in (typing.Union, UnionType):
        found = [faults(value, option, where) for option in args]
        return [] if [] in found else found[0]
    if origin is typing.Literal:
        return [] if value in args else [f"{where}: {value!r} is none of {args}"]
    if origin is list and isinstance(value, list):
        return [fault for index, each in enumerate(value) for fault in faults(each, args[0], f"{where}[{index}]")]
    if origin is dict and isinstance(value, dict):
        return [fault for key, each in value.items() for fault in faults(each, args[1], f"{where}.{key}")]
    if origin is None and isinstance(hint, type):
        return _faults_of_class(value, hint, where)
    return [f"{where}: {value!r} is no {hint}"]


def _faults_of_class(value: Any, hint: type, where: str) -> list[str]:
    if issubclass(hint, enum.Enum):
        return [] if value in [member.value for member in hint] else [f"{where}: {value!r} is no {hint.__name__}"]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return []
    if hasattr(hint, "from_json") and isinstance(value, dict):
        value = hint.from_json(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        return [f"{where}: {value!r} is no {hint.__name__}"]
    if not hasattr(value, "to_json"):
        return []
    own = typing.get_type_hints(type(value))
    return [fault for name, each in own.items() for fault in faults(getattr(value, name), each, f"{where}.{name}")]


def unknown(written: Any, read: Any, where: str = "dashboard") -> list[str]:
    """What was written that the schema does not know: Grafana would drop it."""
    if isinstance(written, dict):
        lost = [f"{where}.{key}" for key in written if not isinstance(read, dict) or key not in read]
        known = [key for key in written if isinstance(read, dict) and key in read]
        return lost + [path for key in known for path in unknown(written[key], read[key], f"{where}.{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [path for index, (one, other) in pairs for path in unknown(one, other, f"{where}[{index}]")]
    return [] if written == read else [where]


def check_schema(page: dict[str, Any]) -> None:
    plugins.register_default_plugins()
    read = Dashboard.from_json(page)
    assert faults(read, Dashboard) == []
    assert unknown(page, json.loads(json.dumps(read, cls=JSONEncoder))) == []


def test_the_dashboard_is_what_its_script_builds() -> None:
    assert dashboard() == build_dashboard.build(), "run python scripts/build_dashboard.py"


def test_the_dashboard_fits_grafanas_schema() -> None:
    check_schema(dashboard())


@pytest.mark.parametrize("spoil", ["type", "unknown key", "enum"])
def test_the_check_of_the_schema_finds_faults(spoil: str) -> None:
    page = dashboard()
    panel = page["panels"][1]
    if spoil == "type":
        panel["gridPos"]["w"] = "wide"
    elif spoil == "unknown key":
        panel["targets"][0]["query"] = "up"
    else:
        panel["options"]["colorMode"] = "purple"
    with pytest.raises(AssertionError):
        check_schema(page)


def test_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)


def test_its_uid_is_none_of_rays() -> None:
    """Ray writes its own dashboards into the same directory."""
    (directory,) = dashboards.__path__
    rays = {uid for file in Path(directory).glob("*.py") for uid in RAYS_UIDS.findall(file.read_text())}
    assert len(rays) > 4 and dashboard()["uid"] not in rays


# --- names ------------------------------------------------------------------------------------------------------------


@every_query
def test_queries_name_metrics_that_are_exported(query: Query) -> None:
    assert query.metrics, "it reads none of this project's metrics"
    assert query.metrics <= exported_tags().keys()


@every_query
def test_queries_group_by_labels_that_the_metrics_have(query: Query) -> None:
    tags = exported_tags()
    for labels, metric in re.findall(r"by \(([\w, ]+)\) \((?:\w+\()*(ray_flowtrain_\w+)", query.expr):
        assert set(labels.split(", ")) <= tags[metric] | {"le"}, metric
    for metric, label in re.findall(r"(ray_flowtrain_\w+)\{(\w+)=~", query.expr):
        assert label in tags[metric]


def test_every_metric_has_a_place_on_the_dashboard() -> None:
    shown = set().union(*(query.metrics for query in panel_queries()))
    buckets = {name for name in exported_tags() if not name.endswith(("_sum", "_count"))}
    assert buckets <= shown


@pytest.mark.parametrize("query", panel_queries(), ids=lambda query: f"{query.where}-{len(query.expr)}")
def test_panels_use_only_variables_that_there_are(query: Query) -> None:
    assert set(re.findall(r"\$\{?(\w+)", query.expr)) <= VARIABLES
    assert '{run=~"$run"}' in query.expr


def test_legends_use_labels_of_their_query() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            grouped = {
                label for labels in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in labels.split(", ")
            }
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, panel["title"]


# --- rules ------------------------------------------------------------------------------------------------------------


def test_every_rule_says_what_happened_and_what_to_change() -> None:
    expected = {"FlowTrainStarved", "FlowTrainPoolFull", "FlowTrainNoStep", "FlowTrainNotFinite", "FlowTrainRestarts"}
    assert {rule["alert"] for rule in rules()} == expected
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert " $" not in rule["expr"], "rules have no variables"


def test_the_page_lists_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"^\| `(FlowTrain\w+)`", page, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    metrics = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    named = {name for line in metrics.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    prefix = "ray_flowtrain_"
    exported = {name.removeprefix(prefix) for name in exported_tags() if not name.endswith(("_sum", "_count"))}
    assert {name.removesuffix("_bucket") for name in exported} <= named


def test_prometheus_reads_the_rules_and_rays_list_of_nodes() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert [(MONITORING / name).is_file() for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    (discovery,) = job["file_sd_configs"]
    assert discovery["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
