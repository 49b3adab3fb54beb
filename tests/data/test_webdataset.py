from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowtrain.data.sources import webdataset
from flowtrain.data.sources.base import BadSample, Turn
from flowtrain.errors import DataError
from flowtrain.types.samples import RejectReason

Open = Callable[..., Any]
Member = tuple[str, bytes]
ASK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


def as_json(record: Any) -> bytes:
    return json.dumps(record).encode()


def write_tar(path: Path, members: Sequence[Member | tarfile.TarInfo], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def numbered(count: int, image_nbytes: int = 10) -> list[Member]:
    members: list[Member] = []
    for i in range(count):
        turns = [{"role": "user", "content": f"<image>q{i}"}, {"role": "assistant", "content": f"a{i}"}]
        members += [
            (f"d/{i:04}.jpg", bytes([i % 256]) * image_nbytes),
            (f"d/{i:04}.json", as_json({"messages": turns})),
        ]
    return members


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_samples_are_members_with_the_same_key(tmp_path: Path, open_rows: Open, format: int) -> None:
    write_tar(tmp_path / "0.tar", numbered(7), format)
    write_tar(tmp_path / "1.tar", numbered(3), format)
    rows = open_rows(tmp_path)
    assert len(rows) == 10 and rows.index.num_blocks == 2
    for row, number in [(9, 2), (0, 0), (6, 6), (7, 0)]:
        sample = rows.read(row)
        assert sample.turns == (Turn("user", f"<image>q{number}"), Turn("assistant", f"a{number}"))
        assert sample.images[0].data == bytes([number]) * 10 and sample.id == f"d/{number:04}"


def test_images_come_in_the_order_of_the_json_or_of_their_names(tmp_path: Path, open_rows: Open) -> None:
    two = [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "x"}]
    rows = open_rows(
        write_tar(
            tmp_path / "x.tar",
            [
                ("a.10.png", b"ten"),
                ("a.2.png", b"two"),
                ("a.json", as_json({"id": 5, "conversations": two})),
                ("b.1.png", b"one"),
                ("b.2.PNG", b"two"),
                ("b.json", as_json({"images": ["2.PNG", "b.1.png"], "conversations": two})),
                ("c.json", as_json({"image": "absent.png", "conversations": ASK})),
            ],
        )
    )
    assert [image.data for image in rows.read(0).images] == [b"two", b"ten"] and rows.read(0).id == "5"
    assert [image.data for image in rows.read(1).images] == [b"two", b"one"]
    with pytest.raises(BadSample, match=r"image\[0\] = 'absent.png'") as caught:
        rows.read(2)
    assert caught.value.reason is RejectReason.MISSING_IMAGE


def test_captions_and_data_about_samples(tmp_path: Path, open_rows: Open) -> None:
    members = [
        ("a.jpg", b"image"),
        ("a.txt", "été".encode()),
        ("a.json", as_json({"width": 3, "caption": "no turns"})),
        ("b.jpg", b"image"),
        ("b.cls", b"7"),
        ("b.pkl", b"cos\nsystem\n(S'false'\ntR."),
        ("c.txt", b"\xff"),
        ("d.json", b"[" * 100_000),
        ("e.json", b'{"conversations": [{"from": "gpt", "value": "\xff"}]}'),
        ("f.json", as_json({"conversations": ASK[1:]})),
        ("f.json", as_json({"conversations": ASK[1:]})),
        ("g.json", as_json({"conversations": ASK[1:]})),
    ]
    rows = open_rows(write_tar(tmp_path / "x.tar", members))
    assert rows.read(0).turns == (Turn("user", "<image>\n"), Turn("assistant", "été"))
    for row, detail in enumerate(["neither a .json", "not UTF-8", "nested too deep", "utf-8", "2 members .json"], 1):
        with pytest.raises(BadSample, match=detail) as caught:
            rows.read(row)
        assert caught.value.reason is RejectReason.MALFORMED_SAMPLE
        assert caught.value.sample_id == "abcdef"[row]
    assert rows.read(6).turns == (Turn("assistant", "A cat."),)


def test_what_is_no_file_is_passed_over(tmp_path: Path, open_rows: Open) -> None:
    members: list[Member | tarfile.TarInfo] = []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        info = tarfile.TarInfo("a.png" if kind != tarfile.DIRTYPE else "a")
        info.type, info.linkname = kind, "/etc/passwd"
        members.append(info)
    turns = as_json({"conversations": ASK[1:]})
    rows = open_rows(write_tar(tmp_path / "x.tar", [("a.json", turns), *members, ("b.json", turns)]))
    assert len(rows) == 2
    assert rows.read(0).images == () and rows.read(1).turns == (Turn("assistant", "A cat."),)


def test_members_without_a_key_are_passed_over(tmp_path: Path, open_rows: Open) -> None:
    turns = as_json({"conversations": ASK})
    names = ["README", "d/._a.jpg", "d/a.jpg", "d/._a.json", "d/a.json", "d/.hidden"]
    rows = open_rows(write_tar(tmp_path / "x.tar", [(name, turns) for name in names]))
    assert len(rows) == 1 and rows.read(0).id == "d/a"


def test_a_header_between_two_spans(tmp_path: Path, open_rows: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "SPAN_ROWS", 2)
    turns = as_json({"conversations": ASK[1:]})
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for i in range(4):
            info = tarfile.TarInfo(f"{i}.json")
            info.size = len(turns)
            tar.addfile(info, io.BytesIO(turns))
            if i < 3:
                header = tarfile.TarInfo.create_pax_global_header({"comment": str(i)})
                tar.fileobj.write(header)
                tar.offset += len(header)
    rows = open_rows(tmp_path / "x.tar")
    assert rows.index.num_blocks == 2 and [rows.read(row).id for row in range(4)] == list("0123")


def test_archives_joined_in_the_wrong_way_are_refused(tmp_path: Path, open_rows: Open) -> None:
    """Readers of tar stop at the end of the first one."""
    one, two = (write_tar(tmp_path / name, numbered(1)).read_bytes() for name in ("1.tar", "2.tar"))
    (tmp_path / "1.tar").write_bytes(one + two)
    with pytest.raises(DataError, match="1.tar.*another archive comes after its end"):
        open_rows(tmp_path / "1.tar")


def test_a_large_shard_is_many_blocks(tmp_path: Path, open_rows: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "SPAN_NBYTES", 20_000)
    monkeypatch.setattr(webdataset, "MAX_SAMPLE_NBYTES", 40_000)
    members = [*numbered(20, image_nbytes=4_000), ("e/0.jpg", b"x" * 30_000), ("e/0.txt", b"large")]
    members += [("e/1.jpg", b"x" * 50_000), ("e/1.txt", b"larger"), ("e/2.txt", b"small")]
    rows = open_rows(write_tar(tmp_path / "x.tar", members))
    assert rows.index.image_nbytes.tolist() == [*[12_000] * 6, 8_000, 30_000, 0, 0] and len(rows) == 23
    assert [image.data for row in range(20) for image in rows.read(row).images] == [
        bytes([i]) * 4_000 for i in range(20)
    ]
    assert len(rows.read(20).images[0].data) == 30_000 and rows.read(22).turns[1].text == "small"
    with pytest.raises(BadSample, match="more than 40000") as caught:
        rows.read(21)
    assert caught.value.reason is RejectReason.OVERSIZED_SAMPLE


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        (lambda data: data[:5000], "unexpected end"),
        (lambda data: data[:5120] + b"\xff" * 512 + data[5632:], "a header that cannot be read"),
        (lambda data: b"no tar" * 1000, "damaged"),
        (gzip.compress, "compressed"),
        (lambda data: b"", "is empty, not even"),
        (lambda data: b"\0" * 10240, "has no rows, it is empty"),
    ],
)
def test_a_damaged_shard_is_named(
    tmp_path: Path, open_rows: Open, damage: Callable[[bytes], bytes], detail: str
) -> None:
    path = write_tar(tmp_path / "x.tar", numbered(9))
    data = path.read_bytes()
    path.write_bytes(damage(data))
    with pytest.raises(DataError, match=detail) as caught:
        open_rows(path)
    assert str(path) in str(caught.value)


def test_a_header_that_claims_to_be_huge_is_not_read(tmp_path: Path, open_rows: Open) -> None:
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2048)
    with pytest.raises(DataError, match=r"x\.tar: .*a header of \d+ bytes"):
        open_rows(tmp_path / "x.tar")
