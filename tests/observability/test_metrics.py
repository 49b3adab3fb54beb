from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import CheckpointError
from flowtrain.observability.metrics import MetricsWriter, read_metrics

KEYS = [
    *("schema", "timestamp", "step", "epoch", "loss", "lr", "grad_norm"),
    *("num_samples", "num_tokens", "num_target_tokens"),
    *("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "backbone_mfu", "peak_flops"),
    *("starved_s", "blocked_s", "fetch_s", "read_nbytes", "plan_digest", "plan_time_s", "plan_wait_s"),
    *("produced_samples_per_s", "consumed_samples_per_s"),
    *("num_microbatches", "packing_fill", "dp_imbalance", "pool_dram_nbytes", "pool_hbm_nbytes"),
    *("eval_loss", "rejected", "skipped", "skipped_steps", "emulated", "host_s", "rewound_to"),
    *("eval_losses", "source_losses", "slot_imbalance", "lookahead_steps", "read_nbytes_by_transport"),
    *("retries", "restarts", "pool", "spike"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_a_line_has_exactly_the_documented_keys_and_is_private(path: Path, make_metrics: Any) -> None:
    writer = MetricsWriter(path)
    writer.write(make_metrics(1))
    (line,) = path.read_text().splitlines()  # before close: it can be followed while the run goes on
    assert list(json.loads(line)) == KEYS
    assert json.loads(line)["schema"] == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    writer.close()


def test_a_loss_is_written_to_the_bit_and_what_is_not_finite_as_null(path: Path, make_metrics: Any) -> None:
    writer = MetricsWriter(path)
    writer.write(make_metrics(1, loss=0.1 + 0.2))
    writer.write(make_metrics(2, loss=math.nan, grad_norm=math.inf))
    first, second = read_metrics(path)
    assert first["loss"] == 0.1 + 0.2
    assert second["loss"] is None and second["grad_norm"] is None


@pytest.mark.parametrize("torn", ["", '{"schema": 1, "st', '{"schema": 1}\x00', "7"])
def test_a_resume_drops_later_steps_and_a_torn_line(path: Path, make_metrics: Any, torn: str) -> None:
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write(make_metrics(step))
    writer.close()
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2, 3, 4, 5]

    resumed = MetricsWriter(path)
    resumed.truncate_after(3)
    resumed.write(make_metrics(4))
    resumed.close()
    assert steps(path) == [1, 2, 3, 4]
    assert path.read_text().endswith("\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(path: Path, make_metrics: Any) -> None:
    writer = MetricsWriter(path)
    writer.write(make_metrics(1))
    writer.close()
    path.write_text("rubbish\n" + path.read_text())
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 1: not a JSON object"):
        MetricsWriter(path).truncate_after(1)


@given(cut=st.integers(0, 10_000))
def test_a_kill_at_any_byte_loses_at_most_the_line_it_tore(
    make_metrics: Any, tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 5):
        writer.write(make_metrics(step))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    found = steps(path)
    complete = path.read_bytes().count(b"\n")
    assert found == list(range(1, len(found) + 1))
    assert len(found) in (complete, complete + 1)
