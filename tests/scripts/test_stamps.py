"""The captioned stamps: which pictures are taken, how they are split, and how they are stored."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
from build_stamps import SIDE, Stamp, read_stamps, split, write
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image


def put(root: Path, name: str, text: str, ending: str = ".png") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    if ending == ".png":
        Image.new("RGBA", (30, 20), (200, 30, 30, 255)).save(path.with_suffix(ending))
    else:
        path.with_suffix(ending).write_text("<svg/>")


def test_pngs_with_an_english_caption_are_taken(tmp_path: Path) -> None:
    put(tmp_path, "birds/tucan", "A toucan.\nde.utf8=Ein Tukan.\n")
    put(tmp_path, "birds/lark", "A  lark\n")
    put(tmp_path, "birds/drawn", "A drawing.\n", ending=".svg")
    put(tmp_path, "birds/empty", "")
    put(tmp_path, "birds/foreign", "Тукан.\n")
    (tmp_path / "README.txt").write_text("Stamps of many kinds.\n")
    found = read_stamps(tmp_path)
    assert [(stamp.png.name, stamp.caption) for stamp in found] == [
        ("lark.png", "A lark."),
        ("tucan.png", "A toucan."),
    ]


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(0, 30))
def test_a_caption_is_in_one_part_and_no_picture_is_lost(captions: list[int], num_held_out: int) -> None:
    stamps = [Stamp(Path(f"{index}.png"), f"Caption {number}") for index, number in enumerate(captions)]
    parts = split(stamps, num_held_out)
    assert sorted(stamp.png for part in parts.values() for stamp in part) == sorted(stamp.png for stamp in stamps)
    assert not {stamp.caption for stamp in parts["train"]} & {stamp.caption for stamp in parts["eval"]}
    assert len(parts["eval"]) >= min(num_held_out, len(stamps))


def test_a_stored_picture_is_whole_and_square_on_white(tmp_path: Path) -> None:
    put(tmp_path, "flag", "A flag.\n")
    assert write(read_stamps(tmp_path), tmp_path / "out.parquet") == 1
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
    assert image.size == (SIDE, SIDE) and row["texts"][0]["assistant"] == "A flag."
    (top, middle) = (image.getpixel((SIDE // 2, y)) for y in (2, SIDE // 2))
    assert min(top) > 240 and middle[0] > 180 and max(middle[1:]) < 60
