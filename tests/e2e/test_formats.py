"""The same samples as parquet, tar shards, JSONL with image files, and from S3: the same ledger and the same losses."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.disturbed import exact_metrics
from tests.e2e.processes import driver
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BLOCK = 16
"""Rows of a block in every format (``World.write`` makes row groups of this size)."""
NUM_ROWS = 7 * BLOCK + 5
BAD_ROW = 40


@pytest.fixture(scope="module")
def world() -> World:
    world = World(seed=11)
    world.add_mixed(NUM_ROWS)
    world.rows[BAD_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    return world


def blocks_of(world: World) -> list[list[dict[str, Any]]]:
    return [world.rows[first : first + BLOCK] for first in range(0, NUM_ROWS, BLOCK)]


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": role, "content": text[role]} for text in row["texts"] for role in ("user", "assistant")]


def write_parquet(world: World, directory: Path) -> Path:
    return world.write(directory / "train.parquet")


def write_json_lines(world: World, directory: Path) -> Path:
    """One file a block, as ms-swift and LLaMA-Factory have it; every image is a file."""
    for number, rows in enumerate(blocks_of(world)):
        lines = []
        for index, row in enumerate(rows):
            names = [f"images/{number}-{index}-{k}.png" for k in range(len(row["images"]))]
            for name, image in zip(names, row["images"], strict=True):
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(image["bytes"])
            lines.append(json.dumps({"messages": messages_of(row), "images": names}))
        (directory / f"part-{number:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def write_shards(world: World, directory: Path) -> Path:
    """One tar a block, as WebDataset has it."""
    for number, rows in enumerate(blocks_of(world)):
        with tarfile.open(directory / f"shard-{number:03d}.tar", "w") as shard:
            for index, row in enumerate(rows):
                key, members = f"{number:03d}{index:03d}", {}
                names = [f"{k}.png" for k in range(len(row["images"]))]
                record = {"messages": messages_of(row), "images": [f"{key}.{name}" for name in names]}
                members["json"] = json.dumps(record).encode()
                for name, image in zip(names, row["images"], strict=True):
                    members[name] = image["bytes"]
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(data)
                    shard.addfile(info, io.BytesIO(data))
    return directory


WRITERS = {"parquet": write_parquet, "json": write_json_lines, "webdataset": write_shards}


def config_of(directory: Path, source: str | Path, name: str, num_feeders: int = 1) -> RunConfig:
    """Two epochs and a bit, a few blocks mixed."""
    return tiny_config(
        directory,
        Path("unused"),
        name,
        data={
            "sources": [{"path": str(source), "name": "samples"}],
            "shuffle_blocks": 3,
            "num_feeders": num_feeders,
            "max_seq_len": 128,
            "max_image_nbytes": 1 << 17,
        },
        training={"max_steps": 20, "global_batch_size": 12, "learning_rate": 1e-3, "lr_schedule": "constant"},
    )


@pytest.fixture(scope="module")
def from_parquet(world: World, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> RunDir:
    directory = tmp_path_factory.mktemp("parquet")
    config = config_of(directory, write_parquet(world, directory), "parquet")
    run_training(config)
    return run_dir(config)


def check_same(run: RunDir, other: RunDir) -> None:
    ledger = read_ledger(run.ledger).to_pylist()
    assert ledger == read_ledger(other.ledger).to_pylist()
    assert {row["row"] for row in ledger} == set(range(NUM_ROWS))
    assert {row["row"] for row in ledger if row["state"] == "rejected"} == {BAD_ROW}
    assert exact_metrics(run) == exact_metrics(other)


@pytest.mark.parametrize(("stored", "num_feeders"), [("json", 1), ("webdataset", 2)])
def test_every_format_trains_alike(
    world: World, from_parquet: RunDir, tmp_path: Path, stored: str, num_feeders: int
) -> None:
    (tmp_path / "data").mkdir()
    config = config_of(tmp_path, WRITERS[stored](world, tmp_path / "data"), stored, num_feeders)
    run_training(config)
    check_same(run_dir(config), from_parquet)


@pytest.fixture(scope="module")
def bucket(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket on a local S3 server, with the samples in all formats; the environment has its credentials."""
    for package in ("moto.server", "s3fs"):
        pytest.importorskip(package, reason="needs s3fs and moto: pip install -c constraints.txt -e '.[dev]'")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="samples")
        for name, write in WRITERS.items():
            directory = tmp_path_factory.mktemp(name)
            write(world, directory)
            for file in directory.rglob("*.*"):
                client.upload_file(str(file), "samples", f"{name}/{file.relative_to(directory)}")
        yield "s3://samples"
    server.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("stored", list(WRITERS))
def test_a_run_from_s3_trains_alike(from_parquet: RunDir, bucket: str, tmp_path: Path, stored: str) -> None:
    config = config_of(tmp_path, f"{bucket}/{stored}", stored, num_feeders=2)
    with driver(config, tmp_path / "s3.log") as started:
        assert started.wait() == 0, started.report("the run from S3 failed")
        check_same(started.run, from_parquet)
