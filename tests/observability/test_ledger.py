from __future__ import annotations

import stat
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import CheckpointError
from flowtrain.observability.ledger import LedgerRow, LedgerState, LedgerWriter, read_ledger

BATCH = 3


def rows(step: int) -> list[LedgerRow]:
    first = (step - 1) * BATCH
    return [
        LedgerRow(p, "data", p % 5, p // 5, step, p % 2, 0, LedgerState.CONSUMED) for p in range(first, first + BATCH)
    ]


def write_steps(writer: LedgerWriter, first: int, last: int, every: int) -> None:
    for step in range(first, last + 1):
        writer.append(rows(step))
        if step % every == 0:
            writer.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.parquet"


def test_the_directory_is_one_parquet_table(path: Path) -> None:
    writer = LedgerWriter(path)
    write_steps(writer, 1, 4, every=2)
    writer.append([LedgerRow(12, "data", 2, 1, 5, None, None, LedgerState.REJECTED)])
    writer.flush()
    assert sorted(part.name for part in path.iterdir()) == [
        "part-00000001-00000002.parquet",
        "part-00000003-00000004.parquet",
        "part-00000005-00000005.parquet",
    ]
    (path / ".part-00000006-00000006.parquet.tmp").write_bytes(b"torn")  # a kill while a part was written
    table = pq.read_table(path)
    assert table.column_names == ["position", "source", "row", "epoch", "step", "dp_rank", "microbatch", "state"]
    assert table.num_rows == read_ledger(path).num_rows == 13
    last = read_ledger(path).to_pylist()[-1]
    assert (last["dp_rank"], last["microbatch"], last["state"]) == (None, None, "rejected")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(part.stat().st_mode) == 0o600 for part in path.glob("part-*"))


def test_rows_that_were_not_flushed_are_not_there(path: Path) -> None:
    writer = LedgerWriter(path)
    write_steps(writer, 1, 5, every=2)
    assert read_ledger(path)["step"].to_pylist() == [1] * BATCH + [2] * BATCH + [3] * BATCH + [4] * BATCH


def test_two_flushes_within_the_same_steps_lose_nothing(path: Path) -> None:
    writer = LedgerWriter(path)
    for row in rows(1):
        writer.append([row])
        writer.flush()
    assert read_ledger(path)["position"].to_pylist() == [0, 1, 2]


@given(
    killed_at=st.integers(1, 9),
    flush_every=st.integers(1, 4),
    resumed_flush_every=st.integers(1, 4),
    resume_behind=st.integers(0, 9),
    truncations=st.integers(1, 2),
)
def test_after_any_kill_and_resume_every_position_is_there_once(
    tmp_path_factory: pytest.TempPathFactory,
    killed_at: int,
    flush_every: int,
    resumed_flush_every: int,
    resume_behind: int,
    truncations: int,
) -> None:
    path = tmp_path_factory.mktemp("run") / "ledger.parquet"
    write_steps(LedgerWriter(path), 1, killed_at, flush_every)
    flushed = killed_at - killed_at % flush_every
    checkpoint = min(resume_behind, flushed)

    resumed = LedgerWriter(path)
    for _ in range(truncations):
        resumed.truncate_after(checkpoint)
    write_steps(resumed, checkpoint + 1, 10, resumed_flush_every)
    resumed.flush()
    table = read_ledger(path)
    assert table["position"].to_pylist() == list(range(10 * BATCH))
    assert table["step"].to_pylist() == [p // BATCH + 1 for p in range(10 * BATCH)]


def test_no_ledger_is_an_error_and_an_empty_one_is_a_table(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ledger.parquet: no ledger here"):
        read_ledger(path)
    LedgerWriter(path).flush()
    assert read_ledger(path).num_rows == 0
