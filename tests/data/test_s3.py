"""Sources in a local S3 server, as users have them in the cloud."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowtrain.config.data import SourceConfig
from flowtrain.data.sources import storage
from flowtrain.data.sources.base import BadSample
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.errors import DataError, SourceReadError

HOW = "needs s3fs and moto: pip install -c constraints.txt -e '.[dev]'"
moto_server = pytest.importorskip("moto.server", reason=HOW)
s3fs = pytest.importorskip("s3fs", reason=HOW)

pytestmark = pytest.mark.nightly

IMAGES = [b"image %d" % i for i in range(6)]
TURNS = [
    [{"role": "user", "content": f"<image>q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(len(IMAGES))
]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system of an S3 server with a bucket ``data``; credentials are in the environment."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flowtrain.data.sources.retries.RETRY_DELAYS_S", (0.0,))
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    fs = storage.filesystem_of("s3://data")
    fs.makedirs("data", exist_ok=True)
    yield fs
    server.stop()
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def in_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i, image in enumerate(IMAGES):
            for ending, data in ((".jpg", image), (".json", json.dumps({"messages": TURNS[i]}).encode())):
                info = tarfile.TarInfo(f"{i}{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def in_parquet(tmp_path: Path) -> bytes:
    pq.write_table(
        pa.table({"images": [[image] for image in IMAGES], "messages": TURNS}), tmp_path / "x", row_group_size=4
    )
    return (tmp_path / "x").read_bytes()


def samples(path: str) -> list[tuple[list[bytes], list[str]]]:
    config = SourceConfig(path=path)
    index = index_source(config)
    source = open_source(config, index)
    found = [record.sample() for block in range(index.num_blocks) for record in source.read_block(block)]
    return [([bytes(i.read(100)) for i in sample.images], [turn.text for turn in sample.turns]) for sample in found]


def test_every_format_gives_the_same_samples(bucket: Any, tmp_path: Path) -> None:
    records = [{"images": [f"p/{i}.jpg"], "messages": turns} for i, turns in enumerate(TURNS)]
    for i, image in enumerate(IMAGES):
        bucket.pipe(f"data/json/p/{i}.jpg", image)
    bucket.pipe("data/json/x.jsonl", "\n".join(map(json.dumps, records)).encode())
    bucket.pipe("data/json/x.json", json.dumps(records).encode())
    bucket.pipe("data/tar/a.tar", in_tar())
    bucket.pipe("data/parquet/sub/a.parquet", in_parquet(tmp_path))
    bucket.pipe("data/parquet/b.parquet", in_parquet(tmp_path))
    expected = [([image], [turn["content"] for turn in turns]) for image, turns in zip(IMAGES, TURNS, strict=True)]
    for path in ("json/x.jsonl", "json/x.json", "tar", "parquet/sub", "parquet/b*.parquet"):
        assert samples(f"s3://data/{path}") == expected, path
    assert samples("s3://data/parquet") == expected * 2
    bucket.rm("data/json/p/3.jpg")
    with pytest.raises(BadSample, match="no image file"):
        samples("s3://data/json/x.jsonl")


def test_a_server_that_is_gone_is_no_fault_of_the_data(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SourceReadError, match=r"data source s3://data/x.parquet after 2 attempts"):
        samples("s3://data/x.parquet")


def test_what_is_not_there_and_what_may_not_be_read(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("s3://data/x.parquet", "s3://absent/x.parquet"):
        with pytest.raises(DataError, match="no such file or directory"):
            samples(path)

    def denied(*args: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(bucket, "info", denied)
    with pytest.raises(DataError, match=r"permission denied.*credentials from the environment: AWS_"):
        samples("s3://data/y.parquet")
