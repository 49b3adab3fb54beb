"""The alert rules on made-up runs, by promtool: healthy ones raise no alarm, sick ones raise theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.monitoring.prometheus import needs_prometheus, promtool
from tests.monitoring.queries import MONITORING, RULES, rules

pytestmark = [needs_prometheus, pytest.mark.nightly]

HEALTHY = {
    "starved_seconds": "0.1+0x400",
    "step_seconds": "4+0x400",
    "blocked_seconds": "7+0x400",
    'pool_occupancy_ratio{role="encoder", tier="dram"}': "1+0x400",
    "step": "0+1x400",
    "num_steps": "1000+0x400",
    "last_step_timestamp_seconds": "0+10x400",
    "loss": "2+0x400",
    "skipped_steps_total": "0+0x400",
    'restarts_total{role="encoder"}': "0+0x400",
}
"""Its backbone is the bottleneck, so encoders are blocked and the pool is full. A value every ten seconds."""

CASES = {
    "healthy": ({}, []),
    "starved": (
        {"starved_seconds": "2+0x400", 'pool_occupancy_ratio{role="encoder", tier="dram"}': "0.4+0x400"},
        ["FlowTrainStarved"],
    ),
    "starved for three minutes": ({"starved_seconds": "0.1+0x80 2+0x18 0.1+0x300"}, []),
    "starved, and the pool is full": ({"starved_seconds": "2+0x400"}, ["FlowTrainPoolFull", "FlowTrainStarved"]),
    "no step since minute 20": (
        {"last_step_timestamp_seconds": "0+10x120 1200+0x300", "step": "0+1x120 120+0x300"},
        ["FlowTrainNoStep"],
    ),
    "slow steps": ({"last_step_timestamp_seconds": "0+10x120 1200+0x300", "step_seconds": "240+0x400"}, []),
    "writes its last checkpoint": (
        {"last_step_timestamp_seconds": "0+10x120 1200+0x300", "step": "0+1x120 1000+0x300"},
        [],
    ),
    "a step is skipped": ({"skipped_steps_total": "0+0x200 1+0x200"}, ["FlowTrainNotFinite"]),
    "the loss is not a number": ({"loss": "NaN+0x400"}, ["FlowTrainNotFinite"]),
    "the loss is infinite": ({"loss": "Inf+0x400"}, ["FlowTrainNotFinite"]),
    "an encoder died once": ({'restarts_total{role="encoder"}': "0+0x150 1+0x300"}, []),
    "encoders die again and again": (
        {'restarts_total{role="encoder"}': "0+0x150 1+0x30 2+0x300"},
        ["FlowTrainRestarts"],
    ),
}
"""What differs from a healthy run, and the alerts that fire at minute 35."""
EVALUATED = "35m"


def test_promtool_accepts_rules_and_configuration() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))
    promtool("check", "config", str(MONITORING / "prometheus.yml"))


@pytest.mark.parametrize("case", CASES)
def test_alerts_fire_where_something_is_to_be_changed(case: str, tmp_path: Path) -> None:
    changes, alerts = CASES[case]
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    expected = [f'{{alertname="{alert}", severity="{severities[alert]}"}}' for alert in alerts]
    series = [{"series": series_of(name), "values": values} for name, values in {**HEALTHY, **changes}.items()]
    fired = {
        "expr": 'sum by (alertname, severity) (ALERTS{alertstate="firing", run="one"})',
        "eval_time": EVALUATED,
        "exp_samples": [{"labels": labels, "value": 1} for labels in expected],
    }
    test = {"interval": "10s", "input_series": series, "promql_expr_test": [fired]}
    file = tmp_path / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "10s", "tests": [test]}))
    promtool("test", "rules", str(file))


def series_of(name: str) -> str:
    """The series of one run."""
    metric, _, labels = name.partition("{")
    return f'ray_flowtrain_{metric}{{run="one"{", " + labels if labels else "}"}'
