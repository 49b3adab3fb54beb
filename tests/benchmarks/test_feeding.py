"""The feeding benchmark's data is what it says, and its counting file system counts every fetched byte."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import _feeding_data
import fsspec
import pyarrow.parquet as pq
import pytest
from _feeding_counted import DIRECTORY, counted, counting
from _feeding_data import GROUP_ROWS, DataSet, large_files
from PIL import Image

FETCH = "import fsspec, sys; fs, path = fsspec.url_to_fs(sys.argv[1]); assert len(fs.cat_file(path, 10, 30)) == 20"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """Two row groups, whose rows share three images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_feeding_data, "NUM_DRAWN", 3)
        directory = tmp_path_factory.mktemp("feeding")
        made = large_files(directory, 0.07)
        assert large_files(directory, 0.07) == made, "it is kept"
        return made


def test_images_are_distinct_and_decode(data: DataSet) -> None:
    groups = list(data.groups())
    assert [len(group) for group in groups] == [GROUP_ROWS] * (data.num_rows // GROUP_ROWS) and len(groups) > 1
    samples = [sample for group in groups for sample in group]
    assert len({sample.image for sample in samples}) == len(samples)
    assert all(100_000 <= len(sample.image) <= 850_000 for sample in samples)
    assert sum(sample.nbytes for sample in samples) == data.payload_nbytes
    for sample in samples[:8]:
        Image.open(io.BytesIO(sample.image)).load()


def test_a_row_groups_images_are_one_page(data: DataSet) -> None:
    column = pq.read_metadata(data.files()[0]).row_group(0).column(0)
    assert column.data_page_offset - column.dictionary_page_offset > GROUP_ROWS * 100_000


def test_shards_hold_the_same_samples(data: DataSet) -> None:
    stored = [sample for group in data.groups() for sample in group]
    for path in sorted(data.shards.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        for row, sample in enumerate(stored):
            assert files[f"{row:08}.jpg"] == sample.image
            turns = json.loads(files[f"{row:08}.json"])["messages"]
            assert [turn["content"] for turn in turns] == [sample.user, sample.assistant]


def test_other_data_is_not_overwritten(data: DataSet) -> None:
    with pytest.raises(SystemExit, match="holds other data"):
        large_files(data.directory.parent, 0.2)


def test_fetches_of_all_processes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1000))
    before = dict(os.environ)
    with counting() as counter:
        fs, inside = fsspec.url_to_fs(counted(path))
        assert fs.cat_file(inside, -100) == path.read_bytes()[-100:] and counter.read() == (100, 1)
        with fs.open(inside, cache_type="none") as file:
            file.seek(500)
            assert file.read(40) == path.read_bytes()[500:540]
        assert counter.read() == (140, 2)
        subprocess.run([sys.executable, "-c", FETCH, counted(path)], check=True, timeout=60)
        assert counter.read() == (160, 3) and counter.num_processes == 2
        assert [fs.unstrip_protocol(name) for name in fs.find(str(tmp_path))] == [counted(path)]
    assert dict(os.environ) == before and DIRECTORY not in os.environ


def test_read_ahead_counts_as_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    with counting() as counter:
        fs, inside = fsspec.url_to_fs(counted(path))
        with fs.open(inside, cache_type="readahead", block_size=1000) as file:
            file.read(100)
        assert counter.read() == (1100, 1)
