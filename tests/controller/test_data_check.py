"""``data_check``: every kind of bad row, duplicates, the verdict, files, and processes that end."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import flowtrain
from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.blocks import ROW, RowChecker
from flowtrain.controller.dataset.check import block_tasks
from flowtrain.controller.dataset.duplicates import find_duplicates
from flowtrain.controller.dataset.report import DataReport, Spread
from flowtrain.controller.dataset.workers import blocks_found
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import ConfigError, WorkerLostError
from tests.e2e.worlds import World, tiny_config

NUM_GOOD = 40
LATE = "found only when it is decoded"


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def bad_rows(world: World) -> dict[str, dict[str, Any]]:
    """A row of each kind that is quarantined."""

    def row(user: str = "what is it", answer: str = "a cat", images: list[Any] | None = None) -> dict[str, Any]:
        stored = [image if isinstance(image, dict) else {"bytes": image, "path": None} for image in images or []]
        return {"images": stored, "texts": [{"user": user, "assistant": answer}]}

    return {
        "corrupt_image": row(images=[world.image(), b"no image at all"]),
        "missing_image": row(images=[{"bytes": None, "path": "gone.png"}]),
        "decompression_bomb": row(images=[png(200, 200)]),
        "oversized_sample": row(answer="very long words " * 100),
        "placeholder_mismatch": row(user="<image> and <image>", images=[world.image()]),
        "empty_answer": row(answer="  "),
        "malformed_sample": {"images": [], "texts": []},
        LATE: row(images=[world.truncated_image()]),
    }


@pytest.fixture
def world() -> World:
    world = World(seed=3)
    world.add_mixed(NUM_GOOD)
    return world


def checked(config: RunConfig, **options: Any) -> DataReport:
    return flowtrain.data_check(config, **{"workers": 1, **options})


def test_every_kind_of_bad_row_is_found_with_its_place_and_reason(tmp_path: Path, world: World) -> None:
    bad = bad_rows(world)
    (tmp_path / "late.png").write_bytes(world.truncated_image())
    bad[LATE]["images"] = [{"bytes": None, "path": "late.png"}]
    world.rows += bad.values()
    config = tiny_config(
        tmp_path,
        world.write(tmp_path / "rows.parquet"),
        "bad",
        "data.max_image_pixels=10000",
        f"data.sources.0.image_root={tmp_path}",
    )
    kinds = list(bad)

    report = checked(config)
    assert [(each.ref.row, each.reason.value) for each in report.rejected] == [
        (NUM_GOOD + number, kind) for number, kind in enumerate(kinds) if kind != LATE
    ]
    (source,) = report.sources
    assert (source.num_rows, source.num_accepted, source.num_rejected) == (NUM_GOOD + 8, NUM_GOOD + 1, 7)
    assert report.rejected[0].image == 2
    assert "data.max_image_pixels (10000)" in report.rejected[2].detail

    with_decoding = checked(config, decode=True)
    late = with_decoding.rejected[-1]
    assert (late.ref.row, late.reason.value, late.image) == (NUM_GOOD + 7, "corrupt_image", 1)
    assert late.path is not None and late.path.endswith("late.png"), "one process has the row and the pixels"
    assert "late.png" in late.detail
    assert with_decoding.num_rejected == 8
    assert with_decoding.num_rejected_by_reason["corrupt_image"] == 2


@pytest.mark.parametrize(("limit", "passes"), [(0.16, True), (0.14, False)])
def test_the_verdict_is_the_share_of_rejected_samples_in_the_mixture(
    tmp_path: Path, world: World, limit: float, passes: bool
) -> None:
    good = world.write(tmp_path / "good.parquet")
    bad = World(seed=4)
    bad.add_mixed(7)
    bad.rows += list(bad_rows(bad).values())[:3]
    sources = [{"path": str(good), "weight": 1}, {"path": str(bad.write(tmp_path / "bad.parquet")), "weight": 1}]
    config = tiny_config(
        tmp_path,
        good,
        "mixed",
        f"data.max_rejected_fraction={limit}",
        "data.max_image_pixels=10000",
        "training.max_steps=8",
        data={"sources": sources},
    )
    report = checked(config)
    assert report.rejected_share == pytest.approx(0.15)  # half of the samples come from a source with 3 bad of 10
    assert (report.passes, report.would_end) == (passes, not passes)
    short = checked(config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 7})}))
    assert short.passes, "56 samples are too few to be judged"


def test_duplicates_within_and_across_sources_and_leaks_into_the_evaluation(tmp_path: Path, world: World) -> None:
    other, held_out = World(seed=5), World(seed=6)
    other.add_mixed(6)
    held_out.add_mixed(4)
    world.rows.append(world.rows[2])  # row 40 is row 2
    other.rows += [world.rows[2], world.rows[7], other.rows[0]]  # rows 6, 7 and 8
    held_out.rows += [world.rows[7], other.rows[3], world.rows[9]]  # the last one is not evaluated
    paths = [each.write(tmp_path / f"{name}.parquet") for name, each in (("a", world), ("b", other), ("e", held_out))]
    sources = [{"path": str(path), "name": path.stem} for path in paths[:2]]
    config = tiny_config(
        tmp_path, paths[0], data={"sources": sources, "eval": {"path": str(paths[2]), "max_samples": 6}}
    )
    report = checked(config)
    assert report.duplicates.within == {0: 1, 1: 1}
    assert report.duplicates.across == {(1, 0): 2, (2, 0): 1, (2, 1): 1}
    assert (report.num_repeated, report.num_leaked) == (4, 2)
    assert report.leaked == [((2, 4), (0, 7)), ((2, 5), (1, 3))]
    assert report.duplicates.groups == (
        ((0, 2), (0, 40), (1, 6)),
        ((0, 7), (1, 7), (2, 4)),
        ((1, 0), (1, 8)),
        ((1, 3), (2, 5)),
    )
    record = json.loads(json.dumps(report.as_record()))
    assert record["duplicates"]["leaked"][1] == {"set": "eval", "row": 5, "source": "b", "source_row": 3}
    assert [(source["name"], source["num_checked"]) for source in record["sources"]] == [
        ("a", 41),
        ("b", 9),
        ("eval", 6),
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=30))
def test_duplicates_are_those_that_a_comparison_of_all_pairs_finds(rows: list[tuple[int, int]]) -> None:
    """rows: (source, content)."""
    places: dict[int, list[tuple[int, int]]] = {}
    contents: list[list[int]] = [[], [], []]
    for source, content in rows:
        contents[source].append(content)
    for source, each in enumerate(contents):
        for row, content in enumerate(each):
            places.setdefault(content, []).append((source, row))
    arrays = []
    for each in contents:
        array = np.zeros(len(each), ROW)
        array["row"], array["content"] = np.arange(len(each)), np.array(each, np.uint64).reshape(-1, 1) * [1, 0]
        arrays.append(array)
    found = find_duplicates(arrays)
    groups = sorted(tuple(sorted(group)) for group in places.values() if len(group) > 1)
    assert list(found.groups) == groups and found.num_groups == len(groups)
    within = {source: len(each) - len(set(each)) for source, each in enumerate(contents)}
    assert found.within == {source: count for source, count in within.items() if count}
    across = Counter((source, min(group)[0]) for group in places.values() for source, _ in group)
    assert found.across == {pair: count for pair, count in across.items() if pair[0] != pair[1]}


def test_sizes_and_rejected_rows_are_written_whole_and_pack_reads_the_sizes(tmp_path: Path, world: World) -> None:
    world.rows.insert(3, bad_rows(world)["empty_answer"])
    config = tiny_config(tmp_path, world.write(tmp_path / "rows.parquet"), data={"oversized": "truncate_text"})
    sizes, rejected = tmp_path / "sizes.csv", tmp_path / "rejected.jsonl"
    report = checked(config, sizes=sizes, rejected=rejected)
    with sizes.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == [row for row in range(NUM_GOOD + 1) if row != 3]
    assert [int(row["num_image_tiles"]) for row in rows[:4]] == [1, 0, 2, 1]
    tokens = LengthsFile.read(sizes).lengths.tokens
    assert int(tokens.sum()) == report.sources[0].tokens.total
    (line,) = rejected.read_text().splitlines()
    assert json.loads(line).items() >= {"schema": 1, "row": 3, "reason": "empty_answer"}.items()
    assert flowtrain.pack(config, lengths=sizes).workload.num_tokens > 0
    assert not list(tmp_path.glob(".*")), "a part of a file is left"


def test_a_rejected_row_is_named_by_its_file_too(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    bad = bad_rows(world)["empty_answer"]
    world.rows[17:17] = [bad, bad]
    files = [world.write(folder / f"{name}.parquet") for name in ("a", "b")]
    config = tiny_config(tmp_path, folder, data={"eval": {"path": str(files[1]), "max_samples": 18}})
    report = checked(config, rejected=tmp_path / "rejected.jsonl")
    expected = [(17, "a", 17), (18, "a", 18), (NUM_GOOD + 19, "b", 17), (NUM_GOOD + 20, "b", 18), (17, "b", 17)]
    for rows in (
        report.as_record()["rejected"]["rows"],
        [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()],
    ):
        assert [(row["row"], Path(row["file"]).stem, row["file_row"]) for row in rows] == expected
        assert rows[0]["file"] == str(files[0])


def test_texts_that_are_cut_are_counted(tmp_path: Path, world: World) -> None:
    world.add(0, answer="very long words " * 100)
    config = tiny_config(tmp_path, world.write(tmp_path / "rows.parquet"), data={"oversized": "truncate_text"})
    (source,) = checked(config).sources
    assert (source.num_cut, source.tokens.max, source.num_rejected) == (1, 128, 0)


def test_a_damaged_file_is_a_fault_and_the_others_are_still_checked(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    world.write(folder / "a.parquet")
    damaged = world.write(folder / "b.parquet")
    data = bytearray(damaged.read_bytes())
    data[4:400] = bytes(396)  # the first row group's first pages
    damaged.write_bytes(data)
    report = checked(tiny_config(tmp_path, folder))
    (fault,) = report.faults
    assert (fault.file, fault.num_rows) == (str(damaged), 16)
    assert "b.parquet" in fault.detail
    assert not report.passes
    assert (report.sources[0].num_accepted, report.sources[0].num_unread) == (2 * NUM_GOOD - 16, 16)


def test_a_bad_configuration_is_refused(tmp_path: Path, world: World) -> None:
    config = tiny_config(tmp_path, world.write(tmp_path / "rows.parquet"))
    with pytest.raises(ConfigError, match="chat_template"):
        checked(config, overrides=["model.chat_template='{{ nothing }}'"])
    with pytest.raises(ConfigError, match=r"workers \(--workers\) is 0"):
        checked(config, workers=0)


@given(st.lists(st.integers(0, 1 << 30), max_size=40))
def test_spreads_are_values_that_occur(values: list[int]) -> None:
    spread = Spread.of(np.array(values, np.int64))
    ordered = sorted(values)
    assert spread.total == sum(values)
    if values:
        assert spread.max == ordered[-1]
        for share, found in ((0.5, spread.p50), (0.95, spread.p95)):
            assert found in values
            assert sum(value <= found for value in values) >= share * len(values) - 1e-9


@pytest.fixture
def many_blocks(tmp_path: Path, world: World) -> RunConfig:
    world.add_mixed(24 * 16 - NUM_GOOD)
    world.rows.append(bad_rows(world)["empty_answer"])
    return tiny_config(tmp_path, world.write(tmp_path / "many.parquet"))


@pytest.mark.processes
def test_processes_find_the_same_as_one_and_end(many_blocks: RunConfig) -> None:
    alone, together = checked(many_blocks), checked(many_blocks, workers=2)
    assert together == alone
    assert not multiprocessing.active_children()


@pytest.mark.processes
@pytest.mark.parametrize("killed", [False, True])
def test_processes_end_with_the_check_and_a_dead_one_is_an_error(many_blocks: RunConfig, killed: bool) -> None:
    indexes = SourceSet.index(many_blocks.data)
    tasks = list(block_tasks(indexes, ()))
    assert len(tasks) == 25
    with closing(blocks_found(many_blocks, indexes, False, tasks, 2)) as results:
        assert next(results).task == tasks[0]
        children = multiprocessing.active_children()
        assert len(children) == 2
        if killed:
            for child in children:
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError, match=r"one of 2 processes died.*many\.parquet.*fewer --workers"):
                list(results)
    assert not multiprocessing.active_children()


def test_rows_are_checked_as_a_feeder_sizes_them(tmp_path: Path, world: World) -> None:
    """The sizes equal those that ``flowtrain pack`` plans a run with."""
    config = tiny_config(
        tmp_path, world.write(tmp_path / "rows.parquet"), "same", "data.shuffle=none", "training.max_steps=5"
    )
    indexes = SourceSet.index(config.data)
    sources, checker = SourceSet.from_config(config.data, indexes), RowChecker(config, False)
    found = [checker.check(sources, task).rows for task in block_tasks(indexes, ())]
    planned = flowtrain.pack(config).workload
    assert [int(n) for step in planned.steps for n in step.lengths.tokens] == [
        int(n) for rows in found for n in rows["tokens"]
    ]
