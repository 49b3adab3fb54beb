"""JSON arrays and JSON lines of samples, read by spans; never the whole file.

A span starts at the character that separates its first row from the row before: a comma in an array, the end of a line
in JSON lines. So it shows by itself how it is to be cut. The file's first span starts at byte 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from flowtrain.data.sources.bad_sample import malformed
from flowtrain.data.sources.base import RawSample, Record, image_beneath
from flowtrain.data.sources.blocks import Block, spans_of
from flowtrain.data.sources.json_rows import json_fault, parse_row
from flowtrain.data.sources.retries import read_with_retries
from flowtrain.data.sources.storage import directory_of, open_file, read_range
from flowtrain.data.sources.stored_text import text_of_json
from flowtrain.errors import DataError

SPAN_ROWS = 128
SPAN_NBYTES = 4 << 20
MAX_ROW_NBYTES = 64 << 20
"""A longer row is never held: a line is malformed, an array with one cannot be used."""

_HEAD_NBYTES, _READ_NBYTES = 1 << 12, 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")
# Rows are found as latin-1, which maps every byte to one character; huge integers are no fault here.
_DECODER = json.JSONDecoder(strict=False, parse_int=float)


class JsonFormat:
    """JSON files whose rows name image files beneath ``image_root`` (None: the directory of the file)."""

    def __init__(self, image_root: str | None) -> None:
        self._image_root = image_root

    def find_blocks(self, path: str) -> Sequence[Block]:
        """Return the spans of a file; raises DataError if it is neither an array nor lines of samples."""
        return read_with_retries(lambda: _find_blocks(path), f"data file {path}")

    def read_block(self, path: str, block: Block) -> Sequence[Record]:
        """Return the rows of a span."""
        root = directory_of(path) if self._image_root is None else self._image_root
        if block.nbytes > MAX_ROW_NBYTES:
            return [_LongRow(block)]
        data = read_range(path, block.place, block.nbytes)
        is_array = data.removeprefix(_BOM).lstrip()[:1] == b"[" if block.place == 0 else data[:1] != b"\n"
        rows = list(_elements(path, data) if is_array else _lines(data))
        if len(rows) != block.num_rows:
            raise DataError(
                f"{path}: {len(rows)} rows from byte {block.place} on, where {block.num_rows} were found at the start "
                "of the run; do not change the data during a run"
            )
        return [_JsonRecord(row, block.place + start, root) for start, row in rows]


@dataclass(frozen=True, slots=True)
class _JsonRecord:
    text: bytes
    place: int
    root: str

    def sample(self) -> RawSample:
        text = self.text.removeprefix(_BOM)
        place = self.place + len(self.text) - len(text)
        try:
            record = json.loads(text.decode())
        except UnicodeDecodeError as error:
            what = f"{error.reason} at byte {place + error.start}"
            raise malformed(f"not valid UTF-8 in the row at byte {self.place} of the file: {what}") from error
        except (ValueError, RecursionError) as error:
            what = json_fault(error, place, "byte")
            raise malformed(f"not valid JSON in the row at byte {self.place} of the file: {what}") from error
        return parse_row(record, lambda path, what: image_beneath(self.root, path, what))

    def stored_text(self) -> str:
        return text_of_json(self.text)


@dataclass(frozen=True, slots=True)
class _LongRow:
    block: Block

    def sample(self) -> RawSample:
        raise malformed(f"the row at byte {self.block.place} has {self.block.nbytes} bytes, more than {MAX_ROW_NBYTES}")

    def stored_text(self) -> str:
        return ""


def _find_blocks(path: str) -> list[Block]:
    with open_file(path) as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)
        first = b""
        while not first and (chunk := file.read(_HEAD_NBYTES)):
            first = chunk.lstrip()[:1]
        file.seek(start)
        if not first:
            return []  # writers of shards leave files without a row
        if first == b"[":
            ends = _array_ends(path, file)
        elif first == b"{":
            ends = _line_ends(file, start)
        else:
            raise DataError(f"{path}: expected a JSON array or JSON lines of samples, found {first!r} at the start")
        return list(spans_of(_rows(ends), SPAN_ROWS, SPAN_NBYTES))


def _rows(ends: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for end in ends:
        yield start, end, 0
        start = end


def _line_ends(file: BinaryIO, position: int) -> Iterator[int]:
    """Yield where each line that is not blank ends. position: where the file stands."""
    is_blank = True
    while line := file.readline(_READ_NBYTES):
        position += len(line)
        is_blank = is_blank and line.isspace()
        ended = line.endswith(b"\n")
        if ended and not is_blank:
            yield position - 1
        if ended:
            is_blank = True
    if not is_blank:
        yield position


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    for line in data.split(b"\n"):
        if (line if start else line.removeprefix(_BOM)).strip():
            yield start, line
        start += len(line) + 1


def _elements(path: str, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the start and the text of each element of an array's span."""
    text = data.decode("latin-1")
    at = 3 if data.startswith(_BOM) else 0
    try:
        while (at := _skip(text, at)) < len(text):
            start = _skip(text, at + 1)  # after the bracket or a comma
            _, at = _DECODER.raw_decode(text, start)
            yield start, data[start:at]
    except ValueError as error:
        raise DataError(f"{path}: changed during the run: {error}; do not change the data during a run") from error


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _array_ends(path: str, file: BinaryIO) -> Iterator[int]:
    """Yield where each element of an array ends: at the comma or the bracket after it."""
    window = _Window(path, file)
    window.next_character()
    window.take(1)
    if window.next_character() == "]":
        window.take(1)
    else:
        separator = ","
        while separator == ",":
            start = window.position
            window.skip_element()
            separator = window.next_character()
            if separator not in (",", "]"):
                raise window.fault("expected ',' or ']' after an element")
            if window.position - start > MAX_ROW_NBYTES:
                raise window.fault(f"an element has more than {MAX_ROW_NBYTES} bytes")
            yield window.position
            window.take(1)
    if window.next_character():
        raise window.fault("there is more after the array")


class _Window:
    """The part of a file that is looked at now, as latin-1 text."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._offset = file.tell()
        self._is_last = False

    @property
    def position(self) -> int:
        """Byte in the file that is looked at."""
        return self._offset + self._at

    def next_character(self) -> str:
        """Skip white space; returns the character after it, empty at the end of the file."""
        while (at := _skip(self._text, self._at)) == len(self._text) and not self._is_last:
            self._at = at
            self._grow()
        self._at = at
        return self._text[at : at + 1]

    def take(self, count: int) -> None:
        """Pass some characters that are in the window."""
        self._at += count

    def skip_element(self) -> None:
        """Pass a JSON value; raises DataError if it is none, or larger than a row may be."""
        self.next_character()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_last:  # a number may go on
                    self._at = end
                    return
            except RecursionError as error:
                raise self.fault("nested too deep") from error
            except json.JSONDecodeError as error:
                if self._is_last:
                    self._at = error.pos
                    raise self.fault(error.msg.removesuffix(" at")) from error
                if len(self._text) - self._at > MAX_ROW_NBYTES:
                    raise self.fault(f"an element has more than {MAX_ROW_NBYTES} bytes, or is damaged") from error
            self._grow()

    def fault(self, detail: str) -> DataError:
        """Return the error of a file that is no array."""
        return DataError(
            f"{self._path}: not valid JSON at byte {self.position} ({detail}); expected an array of samples: restore "
            "the file or remove it"
        )

    def _grow(self) -> None:
        """Drop what was passed, and read as much again as is left: so a long element is not parsed many times."""
        rest = self._text[self._at :]
        more = self._file.read(max(_READ_NBYTES, len(rest)))
        self._offset, self._at = self._offset + self._at, 0
        self._text, self._is_last = rest + more.decode("latin-1"), not more
