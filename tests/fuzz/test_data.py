"""A damaged data file is refused with one message, or its damaged rows are quarantined and the others trained."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest

from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.blocks import BlockTask, RowChecker
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from tests.fuzz.config_mutations import QWEN3, SIGLIP
from tests.fuzz.data_mutations import all_damaged
from tests.fuzz.guard import Hung, at_most

LIMIT_S = 20


def config_of(path: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "fuzzed",
            "model": {"family": "variable_llava", "tokenizer": "assets/tokenizer", "device": "cpu"},
            "encoders": {"vision": {"config": SIGLIP}},
            "backbone": {"config": QWEN3},
            "data": {
                "sources": [{"path": path}],
                "max_seq_len": 512,
                "max_image_pixels": 1_000_000,
                "max_image_nbytes": 1 << 18,
            },
        }
    )


def check_message(error: DataError, path: Path) -> None:
    said = str(error)
    assert path.name in said or path.parent.name in said, said
    assert len(said) < 3000 and "Traceback" not in said
    said.encode("utf-8")


def outcome(checker: RowChecker, path: Path) -> Counter[str]:
    data = config_of(str(path)).data
    try:
        indexes = SourceSet.index(data)
    except DataError as error:
        check_message(error, path)
        return Counter(refused=1)
    found: Counter[str] = Counter()
    sources = SourceSet.from_config(data, indexes)
    index = sources.train[0].index
    for block in range(len(index.first_rows) - 1):
        num_rows = int(index.first_rows[block + 1] - index.first_rows[block])
        seen = checker.check(sources, BlockTask(0, block, num_rows))
        if seen.fault is not None:
            check_message(DataError(seen.fault), path)
            found["block refused"] += 1
            continue
        assert len(seen.rows) + len(seen.rejected) == num_rows
        for rejection in seen.rejected:
            assert 0 < len(rejection.detail) <= 1000
            rejection.detail.encode("utf-8")
        found["quarantined"] += len(seen.rejected)
        found["trained"] += len(seen.rows)
    return found


def fuzz(seed: int, count: int, tmp_path: Path) -> Counter[str]:
    checker = RowChecker(config_of("unused.parquet"), decode=True)
    found: Counter[str] = Counter()
    faults: list[str] = []
    for number, path, changes in all_damaged(seed, count, tmp_path):
        started = time.monotonic()
        try:
            with at_most(LIMIT_S):
                found += outcome(checker, path)
        except (Exception, Hung) as error:
            about = f"{type(error).__name__}: {str(error)[:300]} after {time.monotonic() - started:.1f} s"
            faults.append(f"case {number} of seed {seed} {changes}: {about}")
            with contextlib.suppress(OSError):
                path.rename(tmp_path / f"{number}-{path.name}")
    assert not faults, f"{len(faults)} of {count}, kept in {tmp_path}:\n" + "\n".join(faults)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_damaged_file_is_refused_or_its_rows_are_quarantined(tmp_path: Path) -> None:
    found = fuzz(seed=1, count=100, tmp_path=tmp_path)
    assert found["refused"] >= 20 and found["quarantined"] >= 5 and found["trained"] >= 50, found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_thousand_damaged_files(tmp_path: Path) -> None:
    found = fuzz(seed=2, count=1000, tmp_path=tmp_path)
    assert found["refused"] >= 200 and found["quarantined"] >= 50 and found["trained"] >= 500, found
