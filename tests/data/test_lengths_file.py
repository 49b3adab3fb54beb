from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowtrain.config.data import DataConfig, SourceConfig
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.errors import ConfigError


def write(tmp_path: Path, text: str, encoding: str = "utf-8") -> str:
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding=encoding)
    return str(path)


def data_config(oversized: str, max_seq_len: int = 100) -> DataConfig:
    return DataConfig(sources=(SourceConfig(path="a.csv"),), max_seq_len=max_seq_len, oversized=oversized)  # type: ignore[arg-type]


def test_columns_are_found_by_name_whatever_else_there_is(tmp_path: Path) -> None:
    text = "name, num_tokens, num_image_tiles\na, 20, 1\n\nb, 300, 5\n"
    file = LengthsFile.read(write(tmp_path, text, encoding="utf-8-sig"))
    assert file.lengths.tokens.tolist() == [20, 300]
    assert file.lengths.vision.tolist() == [1, 5]
    assert file.num_oversized(100) == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "tiles,num_tokens\n1,2\n",
            "has no column num_image_tiles; its first line names tiles, num_tokens, and num_image_tiles and num_tokens "
            "are needed",
        ),
        (
            "",
            "has no columns num_image_tiles and num_tokens; its first line names nothing, and num_image_tiles and "
            "num_tokens are needed",
        ),
        ("num_image_tiles,num_tokens\n", "has a header and no rows"),
        (
            "num_image_tiles;num_tokens\n1;2\n",
            "has no columns num_image_tiles and num_tokens; its first line names num_image_tiles;num_tokens, and "
            "num_image_tiles and num_tokens are needed; it seems to be separated by semicolons: separate it by commas",
        ),
    ],
)
def test_a_file_without_what_is_needed_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        LengthsFile.read(path)
    assert str(error.value) == f"lengths {path}: {fault}"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,many", "num_tokens is 'many'; it must be an integer from 1 to 2147483647"),
        ("1,0", "num_tokens is '0'; it must be an integer from 1 to 2147483647"),
        ("1", "num_tokens is ''; it must be an integer from 1 to 2147483647"),
        ("1,99999999999", "num_tokens is '99999999999'; it must be an integer from 1 to 2147483647"),
        ("-1,5", "num_image_tiles is '-1'; it must be an integer from 0 to 2147483647"),
        ("1,nan", "num_tokens is 'nan'; it must be an integer from 1 to 2147483647"),
        ("1.5,5", "num_image_tiles is '1.5'; it must be an integer from 0 to 2147483647"),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path: Path, row: str, fault: str) -> None:
    path = write(tmp_path, f"num_image_tiles,num_tokens\n1,2\n{row}\n3,4\n")
    with pytest.raises(ConfigError) as error:
        LengthsFile.read(path)
    assert str(error.value) == f"lengths {path}, line 3: {fault}"


def test_integers_may_be_written_as_floats(tmp_path: Path) -> None:
    file = LengthsFile.read(write(tmp_path, "num_image_tiles,num_tokens\n1.0,20.0\n0,2147483647\n"))
    assert file.lengths.tokens.tolist() == [20, 2147483647]
    assert file.lengths.vision.tolist() == [1, 0]


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read: No such file or directory"):
        LengthsFile.read(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="it is not a CSV in UTF-8"):
        LengthsFile.read(tmp_path / "binary.csv")


def test_rows_that_are_too_long_are_left_out_or_cut(tmp_path: Path) -> None:
    file = LengthsFile.read(write(tmp_path, "num_image_tiles,num_tokens\n1,50\n2,100\n3,101\n4,400\n"))
    rows = np.array([3, 1, 0, 2])
    kept = file.treated(rows, data_config("reject"))
    assert (kept.tokens.tolist(), kept.vision.tolist()) == ([100, 50], [2, 1])
    cut = file.treated(rows, data_config("truncate_text"))
    assert (cut.tokens.tolist(), cut.vision.tolist()) == ([100, 100, 50, 100], [4, 2, 1, 3])
