from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flowtrain.data.sources import storage
from flowtrain.data.sources.base import BadSample, RawImage, image_beneath
from flowtrain.data.sources.image_files import path_beneath
from flowtrain.data.sources.retries import RETRIES, RETRY_DELAYS_S, read_with_retries
from flowtrain.errors import DataError, SourceReadError
from flowtrain.types.samples import RejectReason

Open = Callable[..., Any]
ROWS = [{"images": [], "texts": [{"user": f"q{i}", "assistant": f"a{i}"}]} for i in range(7)]
TALK = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "x"}]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.data.sources.retries.RETRY_DELAYS_S", (0.0, 0.0))


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """The file system of ``memory://``, empty before and after."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def test_every_format_is_read_from_another_file_system(
    tmp_path: Path, bucket: MemoryFileSystem, open_rows: Open, write_parquet: Open, write_json: Open
) -> None:
    write_parquet(tmp_path / "x.parquet", ROWS)
    records = [{"image": f"p/{i}.png", "conversations": TALK} for i in range(3)]
    for name in ("y.jsonl", "z.json"):
        write_json(tmp_path / name, records)
    for name in ("x.parquet", "y.jsonl", "z.json"):
        bucket.pipe(f"/data/{name}", (tmp_path / name).read_bytes())
    for i in range(3):
        bucket.pipe(f"/data/p/{i}.png", b"image %d" % i)
    rows = open_rows("memory://data/x.parquet")
    assert [rows.read(row).turns[0].text for row in (6, 0)] == ["q6", "q0"]
    assert rows.index.files == ("memory://data/x.parquet",)
    for name in ("y.jsonl", "z.json"):
        rows = open_rows(f"memory://data/{name}")
        image = rows.read(2).images[0]
        assert image.path == "memory://data/p/2.png" and image.read(7) == b"image 2"
        with pytest.raises(BadSample, match=r"7 encoded bytes are more than data.max_image_nbytes \(6\)"):
            image.read(6)
    bucket.rm("/data/p/2.png")
    with pytest.raises(BadSample, match="no image file: 'memory://data/p/2.png'"):
        image.read(100)
    gone = open_rows("memory://data/x.parquet")
    bucket.rm("/data/x.parquet")
    with pytest.raises(DataError, match=r"row group 1 of memory://data/x.parquet: no such file.*restore it"):
        gone.source.read_block(1)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_directories_and_patterns(
    tmp_path: Path, bucket: MemoryFileSystem, open_rows: Open, write_parquet: Open, scheme: str
) -> None:
    names = ["b.parquet", "a.parquet", "sub/c.parquet", "sub/.hidden/d.parquet", ".e.parquet", "note.txt", "z.json"]
    content = write_parquet(tmp_path / "one", ROWS).read_bytes()
    root = str(tmp_path / "data") if scheme != "memory://" else "/data"
    fs = bucket if scheme == "memory://" else fsspec.filesystem("file")
    for name in names:
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe(f"{root}/{name}", content)

    def listed(path: str) -> list[str]:
        return [file[file.index("/data/") + 6 :] if "/data/" in file else file for file in open_rows(path).index.files]

    url = f"{scheme}{root}" if scheme != "memory://" else "memory://data"
    found = [name.removeprefix("memory://data/") for name in listed(url)]
    assert found == ["a.parquet", "b.parquet", "sub/c.parquet"]
    found = [name.removeprefix("memory://data/") for name in listed(f"{url}/[bc]*.parquet")]
    assert found == ["b.parquet"]
    found = [name.removeprefix("memory://data/") for name in listed(f"{url}/**/c.*")]
    assert found == ["sub/c.parquet"]
    for path, detail in [
        (f"{url}/*.tar", "pattern matches no file that ends in"),
        (f"{url}/x.parquet", "no such file or directory; restore it, or correct the path"),
    ]:
        with pytest.raises(DataError, match=detail):
            open_rows(path)
    with pytest.raises(DataError, match=r"directory has no file that ends in \.tar"):
        open_rows(url, format="webdataset")


def test_paths_that_cannot_be_opened_say_what_to_do(
    open_rows: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="write hf://datasets/owner/name"):
        open_rows("owner/name")
    with pytest.raises(DataError, match=r"nothing:// is no known protocol"):
        open_rows("nothing://x.parquet")
    with pytest.raises(DataError, match="chained URLs"):
        open_rows("zip://x.parquet::memory://y.zip")

    def absent(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(storage.fsspec, "filesystem", absent)
    storage._filesystem.cache_clear()
    with pytest.raises(DataError, match=r"s3:// needs a package.*pip install 'flowtrain\[s3\]'"):
        open_rows("s3://bucket/x.parquet")
    with pytest.raises(DataError, match=r"pip install 'flowtrain\[gcs\]'"):
        open_rows("gs://bucket/x.parquet")
    storage._filesystem.cache_clear()


class RemoteError(Exception):
    """As a remote library raises it: no OSError, with a status."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__("at https://host/x?Signature=abc")
        self.status = status


def caused(cause: Exception) -> FileNotFoundError:
    """As fsspec reports it."""
    error = FileNotFoundError("x")
    error.__cause__ = cause
    return error


RemoteError.__module__ = "aiohttp.client_exceptions"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(5, "Input/output error"), SourceReadError),
        (TimeoutError("slow"), SourceReadError),
        (RemoteError(), SourceReadError),
        (RemoteError(503), SourceReadError),
        (RemoteError(429), SourceReadError),
        (RemoteError(400), RemoteError),
        (RemoteError(403), DataError),
        (RemoteError(404), DataError),
        (FileNotFoundError("x"), DataError),
        (caused(RemoteError()), SourceReadError),
        (caused(RemoteError(404)), DataError),
        (caused(ValueError()), DataError),
        (PermissionError(13, "no"), DataError),
        (ValueError("ours"), ValueError),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, raised: type[Exception]) -> None:
    attempts = []
    RETRIES.take()  # of other tests

    def read() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(raised) as caught:
        read_with_retries(read, "the thing")
    assert len(attempts) == (3 if raised is SourceReadError else 1)
    assert RETRIES.take() == len(attempts) - 1 and RETRIES.take() == 0
    if raised in (SourceReadError, DataError):
        assert "the thing" in str(caught.value) and "Signature" not in str(caught.value)


def test_three_more_attempts_come_within_three_seconds() -> None:
    assert len(RETRY_DELAYS_S) == 3 and sum(RETRY_DELAYS_S) <= 3.0


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/etc/passwd", "absolute"),
        ("\\\\host\\share", "absolute"),
        ("../x.png", r"'\.\.'"),
        ("a/../../x.png", r"'\.\.'"),
        ("a\\..\\x.png", r"'\.\.'"),
        ("a/%2e%2E/x.png", r"'\.\.'"),
        ("C:\\x.png", "drive letter"),
        ("http://host/x.png", "URL"),
        ("file:///etc/passwd", "URL"),
        ("data:image/png;base64,AAAA", "URL"),
        ("x/zip://y::s3://z", "URL"),
        ("a\0b.png", "NUL"),
    ],
)
def test_image_paths_stay_beneath_their_root(path: str, detail: str) -> None:
    for root in ("/root", "s3://bucket/images"):
        with pytest.raises(BadSample, match=rf"images\[3\] = .*{detail}.*beneath image_root") as caught:
            path_beneath(root, path, "images[3]")
        assert caught.value.reason is RejectReason.MALFORMED_SAMPLE


@pytest.mark.parametrize(
    ("root", "path", "detail"),
    [
        ("/root", "/root/a/1.png", "absolute; .*: write 'a/1.png', relative to /root$"),
        ("/root/", "file:///root/1.png", "write '1.png', relative to /root$"),
        ("s3://bucket/b", "s3://bucket/b/1.png", "write '1.png', relative to s3://bucket/b$"),
        ("/", "/1.png", "write '1.png', relative to /$"),
        ("/root", "/rooted/1.png", "absolute; .*: write it relative to /root$"),
        ("/root", "/root/../1.png", "absolute; .*: write it relative to /root$"),
        ("/root", "https://host/1.png", "put the image there, and write its path relative to /root$"),
        ("https://host", "https://host/a 1.png?Signature=abc", r"'https://host/a 1.png\?...': it is a URL"),
    ],
)
def test_a_path_that_may_not_be_used_says_how_to_write_it(root: str, path: str, detail: str) -> None:
    with pytest.raises(BadSample, match=detail) as caught:
        path_beneath(root, path, "image")
    assert caught.value.path in (path, "https://host/a 1.png?...")
    assert "abc" not in str(caught.value)


def test_a_missing_image_says_where_paths_start(tmp_path: Path) -> None:
    with pytest.raises(BadSample, match=f"no image file: '{tmp_path}/1.png'; .*start from image_root = {tmp_path}$"):
        image_beneath(str(tmp_path), "1.png", "image").read()


def test_harmless_image_paths_are_kept() -> None:
    for path in ("x.png", "a/b..c/x.png", "12:30.png", "./x.png", "été 猫.png"):
        assert path_beneath("/root/", path, "image") == f"/root/{path}"
        assert path_beneath("s3://bucket", path, "image") == f"s3://bucket/{path}"


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("socket")
        for path in ["fifo", "directory", "socket", "loop", "/dev/zero", "/dev/null", "absent", "x" * 300, "\ud800"]:
            with pytest.raises(BadSample) as caught:
                RawImage(path=path).read(1000)
            assert caught.value.reason is RejectReason.MISSING_IMAGE
    for name in ("file", "link"):
        assert RawImage(path=tmp_path / name).read(100) == RawImage(path=tmp_path / name).read() == b"x" * 100
        with pytest.raises(BadSample, match=r"100 encoded bytes are more than data.max_image_nbytes \(99\)") as caught:
            RawImage(path=tmp_path / name).read(99)
        assert caught.value.reason is RejectReason.OVERSIZED_SAMPLE
    with pytest.raises(BadSample, match="more than data.max_image_nbytes"):
        RawImage(path="/proc/cpuinfo").read(3)  # its size is 0
    with pytest.raises(BadSample, match="more than data.max_image_nbytes"):
        RawImage(data=memoryview(b"four")).read(3)


def test_threads_share_a_file_system_and_a_fork_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[Any] = []
    monkeypatch.setattr(storage.fsspec, "filesystem", lambda protocol: ours.append(protocol) or object())
    storage._filesystem.cache_clear()
    first = storage.filesystem_of("memory://x")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(storage.filesystem_of, "memory://y").result() is first
    monkeypatch.setattr(storage.os, "getpid", lambda: -1)
    assert storage.filesystem_of("memory://x") is not first and ours == ["memory"] * 2
    storage._filesystem.cache_clear()
