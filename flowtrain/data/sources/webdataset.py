"""WebDataset: tar shards whose neighbouring members with the same key are a sample.

A member's key is its name up to the first dot of its base name; members without a dot there, or with nothing before it,
are passed over. A sample has its turns in a ``.json`` (as in a JSON
file of samples) or a caption in a ``.txt``, and its images in members of their own, in the order in which the JSON
names them, or else of their names. Nothing else is looked at, and nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from flowtrain.data.sources.bad_sample import BadSample, errors_of_row, malformed
from flowtrain.data.sources.base import RawImage, RawSample, Record, Turn
from flowtrain.data.sources.blocks import Block, spans_of
from flowtrain.data.sources.image_files import shown_path
from flowtrain.data.sources.json_rows import has_turns, parse_row
from flowtrain.data.sources.retries import read_with_retries
from flowtrain.data.sources.storage import open_file, read_range
from flowtrain.data.sources.stored_text import text_of_json
from flowtrain.data.sources.turns import join_images
from flowtrain.errors import DataError
from flowtrain.types.samples import RejectReason

SPAN_ROWS = 128
SPAN_NBYTES = 32 << 20
MAX_SAMPLE_NBYTES = 64 << 20
"""A larger sample is rejected, and never read."""

_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
_HEADER_NBYTES = 1 << 20
"""No header is longer, with a long name or extended attributes."""
_NUMBERS = re.compile(r"(\d+)")


class WebDatasetFormat:
    """Tar shards, not compressed. Links, devices and directories in them are passed over."""

    def find_blocks(self, path: str) -> Sequence[Block]:
        """Return the spans of a shard, found by its headers; raises DataError if it is damaged or cut off."""
        return read_with_retries(lambda: _find_blocks(path), f"data file {path}")

    def read_block(self, path: str, block: Block) -> Sequence[Record]:
        """Return the samples of a span."""
        if block.nbytes > MAX_SAMPLE_NBYTES:
            return [_LargeSample(block)]
        data = read_range(path, block.place, block.nbytes)
        with io.BytesIO(data) as file:
            samples = list(_samples(path, file, block.place))
        if len(samples) != block.num_rows:
            raise DataError(
                f"{path}: {len(samples)} samples from byte {block.place} on, where {block.num_rows} were found at the "
                "start of the run; do not change the data during a run"
            )
        view = memoryview(data)
        return [
            _TarRecord(sample.key, [(m.name, view[m.start : m.start + m.nbytes]) for m in sample.members])
            for sample in samples
        ]


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    start: int
    nbytes: int


@dataclass(slots=True)
class _Sample:
    key: str
    start: int
    """Where its first header starts."""
    end: int
    """Where its last member ends. What lies between samples is in no span: a header alone could not be read there."""
    members: list[_Member]


@dataclass(frozen=True, slots=True)
class _LargeSample:
    block: Block

    def sample(self) -> RawSample:
        raise BadSample(
            RejectReason.OVERSIZED_SAMPLE,
            f"its members take {self.block.nbytes} bytes of the shard, more than {MAX_SAMPLE_NBYTES}",
        )

    def stored_text(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _TarRecord:
    key: str
    members: list[tuple[str, memoryview]]

    def sample(self) -> RawSample:
        with errors_of_row(self.key):
            return self._sample()

    def _sample(self) -> RawSample:
        images = {name: RawImage(data=data) for name, data in self.members if _is_image(name)}
        record = self._json()
        if has_turns(record):
            return parse_row(record, lambda path, what: self._named(images, path, what), _in_order(images), self.key)
        caption = self._one(".txt")
        if caption is None:
            raise malformed(f"sample {self.key[:200]!r} has neither a .json with turns nor a .txt")
        try:
            turns = [Turn("user", ""), Turn("assistant", str(caption, "utf-8"))]
        except UnicodeDecodeError as error:
            raise malformed(f"the .txt of sample {self.key[:200]!r} is not UTF-8: {error}") from error
        return join_images(_in_order(images), turns, [], self.key)

    def stored_text(self) -> str:
        """Return all members by name, with the content of those that are text."""
        return "\n".join(
            f"{name}: " + (text_of_json(data) if name.lower().endswith((".json", ".txt")) else f"{len(data)} bytes")
            for name, data in self.members
        )

    def _json(self) -> object:
        text = self._one(".json")
        if text is None:
            return None
        try:
            return cast(object, json.loads(str(text, "utf-8-sig")))
        except (ValueError, RecursionError) as error:
            what = "nested too deep" if isinstance(error, RecursionError) else error
            raise malformed(f"not valid JSON in the .json of sample {self.key[:200]!r}: {what}"[:300]) from error

    def _one(self, ending: str) -> memoryview | None:
        """Return the member ``<key><ending>``."""
        found = [data for name, data in self.members if name[len(self.key) :].lower() == ending]
        if len(found) > 1:
            raise malformed(f"sample {self.key[:200]!r} has {len(found)} members {ending}")
        return found[0] if found else None

    def _named(self, images: dict[str, RawImage], path: str, what: str) -> RawImage:
        for name, image in images.items():
            if path in (name, name.rpartition("/")[2], name[len(self.key) + 1 :]):
                return image
        detail = f"{what} = {shown_path(path)!r}: no such member of the sample"
        raise BadSample(RejectReason.MISSING_IMAGE, detail, shown_path(path))


def _find_blocks(path: str) -> list[Block]:
    with open_file(path) as file:
        if not file.read(1):
            raise DataError(f"{path}: is empty, not even a tar without members; restore the file or remove it")
        file.seek(0)
        return list(spans_of(_rows(path, file), SPAN_ROWS, SPAN_NBYTES))


def _rows(path: str, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    for sample in _samples(path, file, 0):
        image_nbytes = sum(member.nbytes for member in sample.members if _is_image(member.name))
        is_read = sample.end - sample.start <= MAX_SAMPLE_NBYTES
        yield sample.start, sample.end, image_nbytes if is_read else 0


def _samples(path: str, file: BinaryIO, offset: int) -> Iterator[_Sample]:
    """Group a tar's members by their key. offset: of the file's first byte in the shard, for messages."""
    sample: _Sample | None = None
    try:
        # r: is a tar that is not compressed.
        with tarfile.open(fileobj=cast("io.BytesIO", _Headers(file)), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all of them
                end = tar.offset
                if member.size < 0 or end <= member.offset:
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                if not member.isreg() or member.issparse():
                    continue
                if (key := _key(member.name)) is None:
                    continue
                if sample is not None and sample.key != key:
                    yield sample
                    sample = None
                if sample is None:
                    sample = _Sample(key, member.offset, end, [])
                sample.end = end
                sample.members.append(_Member(member.name, member.offset_data, member.size))
            _check_end(file, tar.offset)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        where = offset + (sample.start if sample is not None else 0)
        raise DataError(
            f"{path}: damaged, cut off or compressed after the sample at byte {where} ({error}); restore the file "
            "(unpack it if it is compressed), or remove it"
        ) from error
    if sample is not None:
        yield sample


def _check_end(file: BinaryIO, at: int) -> None:
    """tarfile stops at a header that it cannot read as if it were the end, which is blocks of zeros, or nothing.

    It does not look after them either, where another archive may lie.
    """
    file.seek(at)
    block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0"):
        raise tarfile.ReadError("a header that cannot be read")
    while block and not block.strip(b"\0"):
        block = file.read(tarfile.BLOCKSIZE)
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    raise tarfile.ReadError("another archive comes after its end: join archives with tar --concatenate, not with cat")


class _Headers:
    """A tar file in which only headers are read; a header that claims to be huge is refused before it fills memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, nbytes: int = -1) -> bytes:
        if not 0 <= nbytes <= _HEADER_NBYTES:
            raise tarfile.ReadError(f"a header of {nbytes} bytes")
        return self._file.read(nbytes)

    def seek(self, place: int) -> int:
        if place < self._file.tell() - tarfile.BLOCKSIZE:
            raise tarfile.ReadError("a member that ends before its header")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def _key(name: str) -> str | None:
    """Return a member's key; None for a name like ``README`` or ``._photo.jpg``, as in the webdataset library."""
    directory, slash, base = name.rpartition("/")
    stem, dot, _ = base.partition(".")
    return directory + slash + stem if stem and dot else None


def _is_image(name: str) -> bool:
    return name.lower().endswith(_IMAGE_ENDINGS)


def _in_order(images: dict[str, RawImage]) -> list[RawImage]:
    """Images by their names, with numbers in them as numbers."""

    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(name)]

    return [images[name] for name in sorted(images, key=order)]
