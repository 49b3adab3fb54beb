from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.data import DataConfig, EvalConfig, SourceConfig
from flowtrain.data.sources import image_files
from flowtrain.data.sources.base import BadSample, RawImage, Turn, normalise
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError, SourceReadError
from flowtrain.types.samples import RejectReason, SampleRef

ROWS = [{"images": [], "texts": [{"user": f"q{i}", "assistant": f"a{i}"}]} for i in range(3)]
RECORDS = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.data.sources.retries.RETRY_DELAYS_S", (0.0, 0.0))


def test_formats_are_told_from_the_path(
    tmp_path: Path, write_parquet: Callable[..., Path], write_json: Callable[..., Path]
) -> None:
    write_parquet(tmp_path / "x.parquet", ROWS)
    write_json(tmp_path / "x.jsonl", RECORDS)
    write_json(tmp_path / "lines.txt", RECORDS)
    for path, num_rows in [("", 3), ("x.parquet", 3), ("x.jsonl", 1)]:
        config = SourceConfig(path=str(tmp_path / path))
        source = open_source(config, index_source(config))
        assert len(source) == num_rows and source.name == str(tmp_path / path)
    named = SourceConfig(path=str(tmp_path / "lines.txt"), format="json", name="mine")
    assert open_source(named, index_source(named)).name == "mine"
    with pytest.raises(DataError, match=r"'\.txt'.*set its format"):
        index_source(SourceConfig(path=str(tmp_path / "lines.txt")))
    with pytest.raises(DataError, match="no such file"):
        index_source(EvalConfig(path=str(tmp_path / "absent.parquet")))
    write_parquet(tmp_path / "empty.parquet", [])
    with pytest.raises(DataError, match=r"empty\.parquet: has no rows, it is empty"):
        index_source(SourceConfig(path=str(tmp_path / "empty.parquet")))
    for name in ("1.jsonl", "2.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="has no rows, its 2 files are empty"):
        index_source(SourceConfig(path=str(tmp_path / "[12].jsonl")))


def test_formats_that_are_left_out_are_named_once(
    tmp_path: Path, write_parquet: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "x.parquet", ROWS)
    for name in ("README.md", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    index_source(SourceConfig(path=str(tmp_path)))
    assert not caplog.messages, "data about data are no samples"
    for name in ("a.tar", "b.TAR", "c.json"):
        (tmp_path / name).write_text("{}")
    assert index_source(SourceConfig(path=str(tmp_path), format="parquet")).num_rows == 3
    assert not caplog.messages, "the format was chosen"
    assert index_source(SourceConfig(path=str(tmp_path))).num_rows == 3
    assert caplog.messages == [
        f"data source {tmp_path}: only its 1 files of format parquet are read, the others are left out (1 .json, "
        "2 .tar); to choose, set the source's format; to read all, give a source for each format"
    ]


def test_held_out_sets_come_last(
    tmp_path: Path, write_parquet: Callable[..., Path], write_json: Callable[..., Path]
) -> None:
    parquet = str(write_parquet(tmp_path / "x.parquet", ROWS))
    lines = str(write_json(tmp_path / "x.jsonl", RECORDS))
    sources = (SourceConfig(path=parquet), SourceConfig(path=lines))
    opened = SourceSet.from_config(DataConfig(sources=sources, eval=EvalConfig(path=parquet)))
    assert opened.sizes == (3, 1) and opened.eval_index(0) == 2 and opened.names[2:] == ["eval"]
    assert opened.read(SampleRef(0, 0, 2, 0)).turns[0].text == "q2"
    assert opened.read(SampleRef(0, 1, 0, 0)).turns[0].text == "hi"
    assert opened.read(SampleRef(0, 2, 1, 0)).turns[0].text == "q1"
    assert len(SourceSet.from_config(DataConfig(sources=sources)).all) == 2


def test_held_out_sets_have_names(
    tmp_path: Path, write_parquet: Callable[..., Path], write_json: Callable[..., Path]
) -> None:
    parquet = str(write_parquet(tmp_path / "x.parquet", ROWS))
    lines = str(write_json(tmp_path / "x.jsonl", RECORDS))
    held_out = {"plain": EvalConfig(path=parquet), "other": EvalConfig(path=lines)}
    opened = SourceSet.from_config(DataConfig(sources=(SourceConfig(path=parquet, name="a"),), eval=held_out))
    assert opened.names == ["a", "eval/plain", "eval/other"] and opened.sizes == (3,)
    assert opened.read(SampleRef(0, opened.eval_index(1), 0, 0)).turns[0].text == "hi"


def test_a_missing_image_file_is_rejected_and_never_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    original = os.open

    def counted(path: str, flags: int) -> int:
        reads.append(path)
        return original(path, flags)

    monkeypatch.setattr(image_files.os, "open", counted)
    (tmp_path / "file").write_bytes(b"x")
    for path in [tmp_path / "absent.png", tmp_path, tmp_path / "file" / "1.png", Path("x" * 300), Path("a\0b")]:
        reads.clear()
        with pytest.raises(BadSample) as caught:
            RawImage(path=path).read()
        assert caught.value.reason is RejectReason.MISSING_IMAGE
        assert len(reads) == 1


def test_storage_that_does_not_answer_is_tried_again_and_then_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.png").write_bytes(b"pixels")
    failures: list[OSError] = [OSError(5, "Input/output error"), TimeoutError("slow")]
    original = os.open

    def flaky(path: str, flags: int) -> int:
        if failures:
            raise failures.pop()
        return original(path, flags)

    monkeypatch.setattr(image_files.os, "open", flaky)
    image = RawImage(path=tmp_path / "1.png")
    assert image.read() == b"pixels"
    failures += [OSError(5, "Input/output error")] * 3
    with pytest.raises(SourceReadError, match=r"1\.png after 3 attempts: .*Input/output"):
        image.read()


def test_bad_sample_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BadSample(RejectReason.CORRUPT_IMAGE, "3 bytes")))
    assert (error.reason, error.detail) == (RejectReason.CORRUPT_IMAGE, "3 bytes")
    assert str(error) == "corrupt_image: 3 bytes"


@pytest.mark.parametrize(
    ("num_images", "texts", "expected"),
    [
        (0, ["q", "a"], ["q", "a"]),
        (1, ["q", "a"], ["<image>\nq", "a"]),
        (2, ["a <image> b <image>", "a"], ["a <image> b <image>", "a"]),
        (2, ["<image>", "<image>"], ["<image>", "<image>"]),
        (1, ["<image><image>", "a"], None),
        (3, ["<image>", "a"], None),
    ],
)
def test_placeholders(num_images: int, texts: list[str], expected: list[str] | None) -> None:
    turns = [Turn(role, text) for role, text in zip(("user", "assistant"), texts, strict=True)]  # type: ignore[arg-type]
    images: list[Any] = [RawImage(data=b"x")] * num_images
    if expected is None:
        with pytest.raises(BadSample) as caught:
            normalise(images, turns)
        assert caught.value.reason is RejectReason.PLACEHOLDER_MISMATCH
        assert f"{num_images} images" in str(caught.value)
    else:
        assert [turn.text for turn in normalise(images, turns).turns] == expected


def test_images_go_in_front_of_the_first_user_turn() -> None:
    turns = [Turn("system", "s"), Turn("user", "q"), Turn("assistant", "a"), Turn("user", "q2")]
    normal = normalise([RawImage(data=b"x")], turns)
    assert [turn.text for turn in normal.turns] == ["s", "<image>\nq", "a", "q2"]
