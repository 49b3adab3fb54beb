"""Writes configs/monitoring/grafana_dashboard.json: ``python scripts/build_dashboard.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "configs" / "monitoring" / "grafana_dashboard.json"
UID, TITLE = "flowtrain", "FlowTrain"
SCHEMA_VERSION = 39
"""Of Grafana 11; later releases read it too."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, ROW_HEIGHT, GRAPH_HEIGHT, STAT_HEIGHT = 24, 1, 8, 4
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A graph, or a single number (``stat``). queries: PromQL with the legend of its series."""

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    red_above: float | None = None
    """A number above it is red."""


def last(metric: str, by: str = "run", reduce: str = "max") -> str:
    """A gauge by run and other labels: Ray's own labels (node, worker, version) are left out."""
    return f'{reduce} by ({by}) (ray_flowtrain_{metric}{{run=~"$run"}})'


def counted(metric: str, by: str = "run") -> str:
    """A counter since the cluster's start."""
    return last(f"{metric}_total", by, "sum")


def per_second(metric: str, by: str) -> str:
    """A counter's rate."""
    return f'sum by ({by}) (rate(ray_flowtrain_{metric}_total{{run=~"$run"}}[{WINDOW}]))'


def quantile(metric: str, share: float) -> str:
    """A quantile of a histogram."""
    rates = f'sum by (run, le) (rate(ray_flowtrain_{metric}_bucket{{run=~"$run"}}[{WINDOW}]))'
    return f"histogram_quantile({share}, {rates})"


STARVED = f"{last('starved_seconds')} / {last('step_seconds')}"
PROCESS = "run, role, rank, tier"
OF_PROCESS = "{{run}} {{role}} {{rank}} {{tier}}"

ROWS: Sequence[tuple[str, Sequence[Panel]]] = [
    (
        "Now",
        [
            Panel("Progress", "Steps done, of all.", "percentunit",
                  [(f"{last('step')} / {last('num_steps')}", "{{run}}")], "stat", 4),
            Panel("Since the last step", "How long ago the last step ended.", "s",
                  [(f"time() - {last('last_step_timestamp_seconds')}", "{{run}}")], "stat", 4, 600),
            Panel("Starved", "Share of the last step in which the backbone waited for data. High: add encoders, or "
                  "CPUs and decode threads.", "percentunit", [(STARVED, "{{run}}")], "stat", 4, 0.2),
            Panel("MFU", "Model FLOPs of the last step over the peak of all devices.", "percentunit",
                  [(last("mfu_ratio"), "{{run}}")], "stat", 4),
            Panel("Restarts", "Actors that were started again, of the whole run.", "short",
                  [(counted("restarts"), "{{run}}")], "stat", 4, 0),
            Panel("Skipped steps", "Steps without an update, since loss or gradients were not finite.", "short",
                  [(counted("skipped_steps"), "{{run}}")], "stat", 4, 0),
        ],
    ),
    (
        "Learning",
        [
            Panel("Loss", "Of training steps, and of each held-out set.", "short",
                  [(last("loss"), "{{run}}"), (last("eval_loss", "run, set"), "{{run}} {{set}}")]),
            Panel("Loss by source", "Of each source's samples in the last step that had some.", "short",
                  [(last("source_loss", "run, source"), "{{run}} {{source}}")]),
            Panel("Gradient norm", "Before clipping.", "short", [(last("gradient_norm"), "{{run}}")]),
            Panel("Learning rate", "", "sci", [(last("learning_rate"), "{{run}}")]),
            Panel("Packing", "Share of the microbatches' capacity in use.", "percentunit",
                  [(last("packing_fill_ratio"), "{{run}}")]),
            Panel("Imbalance", "Costliest rank over the mean, minus one: of a step, and of its slots, in which ranks "
                  "wait for each other.", "percentunit",
                  [(last("step_imbalance_ratio"), "{{run}} step"),
                   (quantile("slot_imbalance_ratio", 0.5), "{{run}} slot, median"),
                   (quantile("slot_imbalance_ratio", 0.9), "{{run}} slot, 90 %")]),
        ],
    ),
    (
        "Speed",
        [
            Panel("Tokens per second", "Of the backbone, in all.", "short", [(last("tokens_per_second"), "{{run}}")]),
            Panel("Tokens per second and device", "", "short", [(last("tokens_per_second_per_device"), "{{run}}")]),
            Panel("Samples per second", "Produced: ready to be trained. Consumed: trained.", "short",
                  [(last("produced_samples_per_second"), "{{run}} produced"),
                   (last("consumed_samples_per_second"), "{{run}} consumed")]),
            Panel("Times of a step", "The step, and what of it was planning and reading from the pool.", "s",
                  [(last("step_seconds"), "{{run}} step"), (last("plan_seconds"), "{{run}} plan"),
                   (last("plan_wait_seconds"), "{{run}} wait for the plan"),
                   (last("fetch_seconds"), "{{run}} fetch")]),
            Panel("Checkpoint", "Time to write the last one.", "s", [(last("checkpoint_seconds"), "{{run}}")]),
            Panel("MFU over time", "Model FLOPs over the peak of all devices.", "percentunit",
                  [(last("mfu_ratio"), "{{run}}")]),
        ],
    ),
    (
        "Flow",
        [
            Panel("Starved and blocked", "Seconds of a step. Starved: the backbone waited for data. Blocked: encoders "
                  "had nothing that they may do, summed over encoders; high without starved is normal.", "s",
                  [(last("starved_seconds"), "{{run}} starved"), (last("blocked_seconds"), "{{run}} blocked")]),
            Panel("Lookahead", "Steps that were ready when the last one ended.", "short",
                  [(last("lookahead_steps"), "{{run}}")]),
            Panel("Reads from the pool", "Bytes per second, by transport.", "Bps",
                  [(per_second("read_bytes", "run, transport"), "{{run}} {{transport}}")]),
            Panel("Pool in use", "Share of what each process gives to the pool.", "percentunit",
                  [(last("pool_occupancy_ratio", PROCESS), OF_PROCESS)], width=12),
            Panel("Pool bytes", "In use, and given.", "bytes",
                  [(last("pool_used_bytes", PROCESS), f"{OF_PROCESS} in use"),
                   (last("pool_bound_bytes", PROCESS), f"{OF_PROCESS} given")], width=12),
        ],
    ),
    (
        "Faults",
        [
            Panel("Restarts by role", "", "short", [(counted("restarts", "run, role"), "{{run}} {{role}}")]),
            Panel("Retries", "Reads of storage, and leases, that were tried again.", "short",
                  [(counted("retries"), "{{run}}")]),
            Panel("Quarantined and skipped", "Samples that were rejected; steps that were not finite.", "short",
                  [(counted("quarantined"), "{{run}} samples"), (counted("skipped_steps"), "{{run}} steps")]),
        ],
    ),
]  # fmt: skip


def build() -> dict[str, Any]:
    """The dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": WIDTH, "h": ROW_HEIGHT}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        top += ROW_HEIGHT
        height = STAT_HEIGHT if row[0].kind == "stat" else GRAPH_HEIGHT
        left = 0
        for panel in row:
            if left + panel.width > WIDTH:
                left, top = 0, top + height
            panels.append(_panel(panel, {"x": left, "y": top, "w": panel.width, "h": height}))
            left += panel.width
        top += height
    return {
        "uid": UID,
        "title": TITLE,
        "description": "Runs of FlowTrain, by the metrics that Ray exports.",
        "tags": ["flowtrain", "ray"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(ray_flowtrain_step, run)"
    return [
        {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": "run"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "stat":
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
        }
        steps: list[dict[str, Any]] = [{"value": None, "color": "green"}]
        if panel.red_above is not None:
            steps.append({"value": panel.red_above, "color": "red"})
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(build(), indent=1) + "\n")
