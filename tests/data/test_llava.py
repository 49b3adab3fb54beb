from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.data.sources.base import BadSample, Turn
from flowtrain.errors import DataError
from flowtrain.types.samples import RejectReason

WriteJson = Callable[[Path, list[Any]], Path]
Open = Callable[..., Any]
ASK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
RECORDS: list[Any] = [
    {"id": 1, "image": "a/1.png", "conversations": ASK},
    {"id": 2, "conversations": [{"from": "system", "value": "Be brief."}, *TALK]},
    {"id": 3, "images": ["2.png", "b/3.png"], "conversations": [*TALK, *TALK]},
    {"id": 4, "image": ["4.png"], "conversations": ASK},
    {"id": 5, "image": "", "conversations": TALK},
    {"id": 6, "image": "5.png", "conversations": [*TALK, *ASK]},
]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_records_of_every_kind(tmp_path: Path, open_rows: Open, write_json: WriteJson, name: str) -> None:
    source = open_rows(write_json(tmp_path / name, RECORDS))
    assert len(source) == 6
    samples = [source.read(row) for row in (5, 4, 3, 2, 1, 0)][::-1]
    paths = [[Path(image.path) for image in sample.images] for sample in samples]
    assert paths == [
        [tmp_path / "a/1.png"],
        [],
        [tmp_path / "2.png", tmp_path / "b/3.png"],
        [tmp_path / "4.png"],
        [],
        [tmp_path / "5.png"],
    ]
    assert samples[0].turns == (Turn("user", "<image>\nWhat?"), Turn("assistant", "A cat."))
    assert [turn.role for turn in samples[1].turns] == ["system", "user", "assistant"]
    assert [turn.text for turn in samples[2].turns] == ["<image><image>\nHi", "Hello", "Hi", "Hello"]
    assert [turn.text for turn in samples[5].turns] == ["Hi", "Hello", "<image>\nWhat?", "A cat."]


def test_the_image_root(tmp_path: Path, open_rows: Open, write_json: WriteJson) -> None:
    source = open_rows(write_json(tmp_path / "x.json", RECORDS), image_root=str(tmp_path / "pictures"))
    assert source.read(0).images[0].path == str(tmp_path / "pictures/a/1.png")
    assert source.read(2).images[1].path == str(tmp_path / "pictures/b/3.png")


def test_json_lines_with_blank_lines_and_wide_characters(tmp_path: Path, open_rows: Open) -> None:
    file = tmp_path / "x.json"  # lines, despite the ending
    line = '{"conversations": [{"from": "human", "value": "%s"}, {"from": "gpt", "value": "été"}]}'
    file.write_text("\n\n" + line % "猫" + "\n  \n" + line % "犬", encoding="utf-8")
    source = open_rows(file)
    assert [source.read(row).turns[0].text for row in (1, 0)] == ["犬", "猫"]
    assert len(source) == 2


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"image": "1.png", "conversations": [*ASK, *ASK]}, "placeholder_mismatch", "1 images but 2 "),
        ({"conversations": ASK}, "placeholder_mismatch", "0 images but 1 "),
        ({"images": ["1", "2"], "conversations": ASK}, "placeholder_mismatch", "2 images but 1 "),
        ({"image": "1.png", "conversations": TALK[1:]}, "placeholder_mismatch", "no user turn"),
        ({"image": "1.png"}, "malformed_sample", "conversations"),
        ({"conversations": []}, "malformed_sample", "conversations"),
        ({"conversations": ["hi"]}, "malformed_sample", r"conversations\[0\]: expected an object, found str"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "malformed_sample", "assistant, gpt, found 'bot'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "malformed_sample", r"\[0\].value: .* found int"),
        ({"image": 3, "conversations": TALK}, "malformed_sample", "image: expected a path"),
        ({"image": "1", "images": ["2"], "conversations": TALK}, "malformed_sample", "both image and images"),
        ([1], "malformed_sample", "expected an object, found list"),
    ],
)
def test_records_that_are_rejected(
    tmp_path: Path, open_rows: Open, write_json: WriteJson, name: str, record: Any, reason: str, detail: str
) -> None:
    source = open_rows(write_json(tmp_path / name, [RECORDS[0], record]))
    with pytest.raises(BadSample, match=detail) as caught:
        source.read(1)
    assert caught.value.reason is RejectReason(reason)
    assert source.read(0).turns


def test_a_broken_line_is_one_bad_sample(tmp_path: Path, open_rows: Open) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"conversations": [{"from": "gpt", "value": "x"}]}\n{"conversations": [\n')
    source = open_rows(file)
    assert source.read(0).turns == (Turn("assistant", "x"),)
    with pytest.raises(BadSample, match="row at byte 51"):
        source.read(1)


@pytest.mark.parametrize(
    ("content", "said"), [("[1, ", "not valid JSON at byte 4"), ("", "found b''"), ("id,image\n", "b'i'")]
)
def test_files_that_are_not_llava(tmp_path: Path, open_rows: Open, content: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        open_rows(file)
    assert "x.json" in str(caught.value)
