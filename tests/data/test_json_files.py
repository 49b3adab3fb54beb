from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.data.sources import json_files
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
        (
            {"image": "1.png", "text": "x"},
            "malformed_sample",
            "neither .* nor messages is given; found keys: image, text$",
        ),
        ({"conversations": None}, "malformed_sample", "neither .* is given; found keys: conversations"),
        ({}, "malformed_sample", "found keys: none"),
        ({"conversations": []}, "malformed_sample", "conversations: expected a list of turns, found an empty one"),
        ({"conversations": {}}, "malformed_sample", "conversations: expected a list of turns, found dict"),
        ({"video": "1.mp4", "conversations": TALK}, "malformed_sample", "video: not supported"),
        ({"videos": ["1.mp4"], "audios": ["1"], "conversations": TALK}, "malformed_sample", "videos and audios: not"),
        ({"conversations": [TALK[0], {**TALK[1], "loss": False}]}, "malformed_sample", r"\[1\].loss = False: not supp"),
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


def test_keys_that_ask_for_nothing_are_passed_over(tmp_path: Path, open_rows: Open, write_json: WriteJson) -> None:
    turns = [{**TALK[0], "loss": False}, {**TALK[1], "loss": True}, TALK[0], {**TALK[1], "loss": None}]
    record = {"videos": [], "video": None, "audios": [], "audio": "", "conversations": turns}
    assert len(open_rows(write_json(tmp_path / "x.json", [record])).read(0).turns) == 4


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_rejected_row_keeps_its_id(tmp_path: Path, open_rows: Open, write_json: WriteJson, name: str) -> None:
    records = [
        {"id": "cat-17", "conversations": [{"from": "bot", "value": "x"}]},
        {"id": 18, "conversations": ASK},
        {"id": "cat-19", "image": "/1.png", "conversations": ASK},
    ]
    rows = open_rows(write_json(tmp_path / name, records))
    for row, (id, path) in enumerate([("cat-17", None), ("18", None), ("cat-19", "/1.png")]):
        with pytest.raises(BadSample) as caught:
            rows.read(row)
        assert (caught.value.sample_id, caught.value.path) == (id, path)


def test_one_empty_file_among_others(tmp_path: Path, open_rows: Open) -> None:
    row = '{"conversations": [{"from": "gpt", "value": "x"}]}\n'
    for name, content in {"a": row, "b": "", "c": "\ufeff\n" + row, ".d": row}.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    for path in (tmp_path, tmp_path / "*.jsonl"):
        rows = open_rows(path)
        assert [rows.read(row).turns[0].text for row in range(len(rows))] == ["x", "x"]


def test_a_broken_line_is_one_bad_sample(tmp_path: Path, open_rows: Open) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"conversations": [{"from": "gpt", "value": "x"}]}\n{"conversations": [\n')
    source = open_rows(file)
    assert source.read(0).turns == (Turn("assistant", "x"),)
    with pytest.raises(BadSample, match="row at byte 51 of the file: Expecting value at byte 70$"):
        source.read(1)


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (
            '{"é": "猫", 7}',
            "not valid JSON in the row at byte {row} of the file: Expecting property name .* at byte {at}$",
        ),
        (
            '{"é": "猫\t7"}',
            "not valid JSON in the row at byte {row} of the file: Invalid control character at byte {at}$",
        ),
        ('{"é": "猫\udcff7"}', "not valid UTF-8 in the row at byte {row} of the file: .* at byte {at}$"),
    ],
)
@pytest.mark.parametrize("before", ["", "\ufeff", "\ufeff{}\n", "{}\n"])
def test_the_byte_of_a_fault_is_the_files(tmp_path: Path, open_rows: Open, before: str, row: str, detail: str) -> None:
    content = (before + row).encode(errors="surrogateescape")
    (tmp_path / "x.jsonl").write_bytes(content)
    rows = open_rows(tmp_path / "x.jsonl")
    start = content.rindex(b"\n") + 1 if b"\n" in content else 0
    at = content.index(b"7") - (0 if "," in row else 1)
    with pytest.raises(BadSample, match=detail.format(row=start, at=at)):
        rows.read(len(rows) - 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [("[1, ", "not valid JSON at byte 4"), ("", "is empty"), ("[]", "is empty"), ("id,image\n", "b'i'")],
)
def test_files_that_are_not_llava(tmp_path: Path, open_rows: Open, content: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        open_rows(file)
    assert "x.json" in str(caught.value)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_records_of_other_trainers(tmp_path: Path, open_rows: Open, write_json: WriteJson, name: str) -> None:
    messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
    items = [{"type": "image"}, {"type": "text", "text": "What?"}]
    ask, answer = (lambda content: {"role": "user", "content": content}), messages[1]
    records = [
        {"messages": messages, "images": ["a.png"]},
        {"messages": messages, "image": {"path": "a.png", "bytes": None}},
        {"messages": [ask(items), answer], "images": ["a.png"]},
        {"messages": [ask([{"type": "image", "image": "a.png"}, items[1]]), answer]},
        {"messages": [ask([{"type": "image_url", "image_url": {"url": "a.png"}}, items[1]]), answer]},
        {"conversations": [{"from": "user", "value": "<image>What?"}, {"from": "assistant", "value": "A cat."}],
         "images": "a.png"},
        {"system": "Be brief.", "messages": messages, "images": ["a.png"], "id": "seven"},
        {"messages": [ask([{"type": "image", "index": 1}, {"type": "image", "index": 0}]), answer],
         "images": ["b.png", "a.png"]},
    ]  # fmt: skip
    rows = open_rows(write_json(tmp_path / name, records))
    for row in range(6):
        sample = rows.read(row)
        assert sample.turns == (Turn("user", "<image>What?"), Turn("assistant", "A cat."))
        assert [image.path for image in sample.images] == [str(tmp_path / "a.png")] and sample.id is None
    assert rows.read(6).turns[0] == Turn("system", "Be brief.") and rows.read(6).id == "seven"
    assert [image.path for image in rows.read(7).images] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]


GOOD = b'{"conversations": [{"from": "gpt", "value": "x"}]}'


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (b'{"conversations": [{"from": "gpt", "value": "\\ud800"}]}', "no Unicode: surrogates not allowed at 0"),
        (b'{"conversations": [{"from": "gpt", "value": "\xff"}]}', "not valid UTF-8"),
        (b'{"conversations": [{"from": "gpt", "value": "a\tb"}]}', "control character"),
        (b'{"id": ' + b"9" * 10_000 + b"}", "limit"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "found 'tool'"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', r"messages\[0\].role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', r"content\[0\]: expected an item"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', r"content\[0\]: expected an item"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image", "index": 3}]}]}', "image 3 is named, of 0"),
        (b'{"messages": [{"role": "user", "content": {}}]}', "expected a string or a list"),
        (b'{"messages": [1], "conversations": [1]}', "both conversations and messages"),
        (b'{"images": [{"bytes": "AAAA"}], "messages": [{"role": "user", "content": ""}]}', "expected a path"),
        (b'{"image": "../x.png", "messages": [{"role": "user", "content": ""}]}', r"image\[0\] = '../x.png': it has"),
        (b'{"image": "\\ud800.png", "messages": [{"role": "bot", "content": ""}]}', "found 'bot'"),
        (b"12", "expected an object, found int"),
        (b"null", "expected an object, found NoneType"),
    ],
)
def test_a_bad_row_spoils_no_other(tmp_path: Path, open_rows: Open, row: bytes, detail: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n".join((GOOD, row, GOOD)))
    (tmp_path / "x.json").write_bytes(b"[" + b",".join((GOOD, row, GOOD)) + b"]")
    for name in ("x.jsonl", "x.json"):
        rows = open_rows(tmp_path / name)
        with pytest.raises(BadSample, match=detail):
            rows.read(1)
        assert [rows.read(row).turns[0].text for row in (0, 2)] == ["x", "x"]


def test_a_row_nested_too_deep(tmp_path: Path, open_rows: Open) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / "x.jsonl").write_bytes(b"\n".join((GOOD, b'{"a":' + deep + b"}", GOOD)))
    rows = open_rows(tmp_path / "x.jsonl")
    with pytest.raises(BadSample, match="row at byte 51 of the file: nested too deep"):
        rows.read(1)
    assert rows.read(2).turns
    (tmp_path / "x.json").write_bytes(b"[" + GOOD + b"," + deep + b"]")
    with pytest.raises(DataError, match=r"x\.json: .*at byte 52 \(nested too deep\)"):
        open_rows(tmp_path / "x.json")


def test_a_long_row_is_never_held(tmp_path: Path, open_rows: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_ROW_NBYTES", 300_000)
    monkeypatch.setattr(json_files, "SPAN_NBYTES", 200)
    monkeypatch.setattr(json_files, "_READ_NBYTES", 1000)
    long = b'{"conversations": [{"from": "gpt", "value": "' + b"x" * 300_000 + b'"}]}'
    (tmp_path / "x.jsonl").write_bytes(b"\n".join((GOOD, long, GOOD, b" " * 400_000)))
    rows = open_rows(tmp_path / "x.jsonl")
    read: list[int] = []
    original = json_files.read_range
    monkeypatch.setattr(json_files, "read_range", lambda *span: read.append(span[2]) or original(*span))
    with pytest.raises(BadSample, match="more than 300000"):
        rows.read(1)
    assert read == [] and rows.read(2).turns and len(rows) == 3
    (tmp_path / "x.json").write_bytes(b"[" + long + b"]")
    with pytest.raises(DataError, match=r"x\.json: .*more than 300000 bytes"):
        open_rows(tmp_path / "x.json")


@pytest.mark.parametrize(
    "content", ["[1, 2", "[1 2]", "[1,]", "[1] 2", "[", "[{]", '["a]', "[1, 2]]", "[,1]", "[1,,2]", "\ufeff[1"]
)
def test_a_damaged_array_is_named(tmp_path: Path, open_rows: Open, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(
        DataError, match=r"x\.json: not valid JSON at byte \d+ .*restore the file or remove it"
    ) as caught:
        open_rows(tmp_path / "x.json")
    assert "line 1" not in str(caught.value)


def test_a_damaged_array_names_the_byte(tmp_path: Path, open_rows: Open) -> None:
    (tmp_path / "x.json").write_text('[{"é": 1}, {"b": x}]')
    with pytest.raises(DataError, match=r"not valid JSON at byte 18 \(Expecting value\)"):
        open_rows(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_file_that_changes_during_the_run_is_named(
    tmp_path: Path, open_rows: Open, write_json: WriteJson, name: str
) -> None:
    rows = open_rows(write_json(tmp_path / name, RECORDS))
    write_json(tmp_path / name, RECORDS[:-1])
    with pytest.raises(DataError, match=r"x\.json.* do not change the data during a run"):
        rows.source.read_block(0)
