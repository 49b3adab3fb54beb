"""Random damage to data files: to the bytes of parquet files, tar shards and JSON lines, and to the images in them."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.mutations import Draft, drafts

IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXT_TYPE = pa.struct([("user", pa.string()), ("assistant", pa.string())])
SCHEMA = pa.schema([("images", pa.list_(IMAGE_TYPE)), ("texts", pa.list_(TEXT_TYPE))])


def good_drafts(seed: int, count: int) -> list[Draft]:
    """Rows with an image and a turn each; odd ones are those of ``tests/data/mutations.py``."""
    rows = []
    for draft in drafts(seed, count):
        images = [image for image in draft.images if 0 < len(image) < 1 << 16][:1]
        rows.append(Draft([("user", "<image>" * len(images) + "what?"), ("assistant", "a cat")], images, draft.id))
    return rows


def write_parquet(path: Path, num_rows: int, seed: int = 0, **options: object) -> None:
    rows = [
        {
            "images": [{"bytes": image, "path": None} for image in draft.images],
            "texts": [{"user": draft.turns[0][1], "assistant": draft.turns[1][1]}],
        }
        for draft in good_drafts(seed, num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=3, **options)


def write_tar(path: Path, num_rows: int, seed: int = 0, **options: object) -> None:
    with tarfile.open(path, "w", format=options.get("format", tarfile.PAX_FORMAT)) as tar:  # type: ignore[arg-type]
        for number, draft in enumerate(good_drafts(seed, num_rows)):
            turns = [{"from": "human", "value": draft.turns[0][1]}, {"from": "gpt", "value": draft.turns[1][1]}]
            members = [(f"{number:04}.json", json.dumps({"conversations": turns}).encode())]
            members += [(f"{number:04}.png", image) for image in draft.images]
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def write_json(path: Path, num_rows: int, seed: int = 0, **options: object) -> None:
    lines = []
    for number, draft in enumerate(good_drafts(seed, num_rows)):
        row: dict[str, object] = {"id": str(number)}
        for image in draft.images:
            (path.parent / f"{number}.png").write_bytes(image)
            row["image"] = f"{number}.png"
        row["conversations"] = [
            {"from": "human", "value": draft.turns[0][1]},
            {"from": "gpt", "value": draft.turns[1][1]},
        ]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


WRITERS: dict[str, Callable[..., None]] = {
    "data.parquet": write_parquet,
    "data.tar": write_tar,
    "data.jsonl": write_json,
}
PARQUET_OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"compression": "none", "use_dictionary": False},
    {"compression": "zstd"},
    {"write_page_checksum": True},
    {"data_page_version": "2.0"},
)
TAR_OPTIONS: tuple[dict[str, object], ...] = ({}, {"format": tarfile.USTAR_FORMAT}, {"format": tarfile.GNU_FORMAT})


def damaged(seed: int, number: int, folder: Path) -> tuple[Path, list[str]]:
    """Write the data file of a case, damaged; returns it, and what was done."""
    rng = random.Random(f"{seed}/{number}")
    name = list(WRITERS)[number % len(WRITERS)]
    choices = {"data.parquet": PARQUET_OPTIONS, "data.tar": TAR_OPTIONS}.get(name, ({},))
    path, options = folder / name, rng.choice(choices)
    WRITERS[name](path, num_rows=rng.choice([1, 4, 9]), seed=number, **options)
    content, changes = path.read_bytes(), [f"{name} {options}"]
    for change in rng.choices(CHANGES, k=rng.choice([1, 1, 2])):
        content = change(rng, content)
        changes.append(change.__name__)
    path.write_bytes(content)
    return path, changes


def bytes_flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 4, 40]) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def footer_flipped(rng: random.Random, data: bytes) -> bytes:
    """A parquet file's metadata lie at its end."""
    at = max(0, len(data) - rng.choice([9, 60, 900]))
    return data[:at] + bytes_flipped(rng, data[at:])


def header_flipped(rng: random.Random, data: bytes) -> bytes:
    return bytes_flipped(rng, data[:512]) + data[512:]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([0, 1, 4, 12, rng.randrange(len(data) + 1), max(0, len(data) - 1)])]


def hole(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    length = rng.randrange(1 + len(data) // 3)
    return data[:at] + rng.choice([b"", b"\0" * length, b"\xff" * length, b" " * length]) + data[at + length :]


def piece_twice(rng: random.Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.randrange(1 + len(data) // 3)
    return data[:at] + data[at : at + length] * rng.choice([2, 3]) + data[at + length :]


def joined(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice([data, b"\0" * 1024, b"PAR1", b"\x1f\x8b" + b"\0" * 50, b"{}\n", b"[", b"null\n"])


def another_content(rng: random.Random, data: bytes) -> bytes:
    return rng.choice([b"", b"PAR1", b"PAR1PAR1", b"\0" * 512, b"\0" * 10_240, b"{}", b"[" * 5000, b"[]", b"null",
                       b'{"conversations": 1}\n', b'{"conversations": [{"from": 1, "value": []}]}\n', b'{"a":' * 3000,
                       b"\x1f\x8b\x08\0", b"PK\x03\x04", b"PAR1" + b"\xff" * 40 + b"\xff\xff\xff\x7fPAR1",
                       bytes(rng.randrange(256) for _ in range(3000))])  # fmt: skip


def numbers_grown(rng: random.Random, data: bytes) -> bytes:
    """Runs of digits (sizes in tar headers, numbers in JSON) become large."""
    places = [at for at in range(len(data)) if data[at : at + 1].isdigit()]
    for at in rng.choices(places, k=6) if places else []:
        data = data[:at] + rng.choice([b"7", b"9", b"-", b"\x80", b"\xff", b"0"]) + data[at + 1 :]
    return data


CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    bytes_flipped, bytes_flipped, footer_flipped, header_flipped, cut, hole, piece_twice, joined, another_content,
    numbers_grown,
)  # fmt: skip


def all_damaged(seed: int, count: int, folder: Path) -> Iterator[tuple[int, Path, list[str]]]:
    """Write one case after another."""
    for number in range(count):
        yield number, *damaged(seed, number, folder)
