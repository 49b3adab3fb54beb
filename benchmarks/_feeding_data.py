"""Data like the hub's: parquet of large JPEGs and short conversations, and the same samples as tar shards.

Row groups of 100 rows, written with pyarrow's default options. A row group's images are then one page: no reader has
one row without reading the group. JPEGs have 100 to 850 KB, evenly distributed on a logarithmic scale. A few hundred
are drawn; each row has one of them with a comment segment of its own. So no two rows hold equal bytes, and no
dictionary of a column makes one of two.
"""

from __future__ import annotations

import io
import json
import math
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

VERSION = 1
"""Part of the description of a data set: other versions are not used again."""
GROUP_ROWS = 100
GROUPS_PER_FILE = 10
NUM_DRAWN = 320
SMALLEST_NBYTES, LARGEST_NBYTES = 103_000, 830_000
MEAN_NBYTES = (LARGEST_NBYTES - SMALLEST_NBYTES) / math.log(LARGEST_NBYTES / SMALLEST_NBYTES)
SMALL_IMAGE_NBYTES = (15_000, 40_000)
SMALL_FILE_ROWS = 4
QUALITY, NOISE = 90, 50
SCHEMA = pa.schema(
    {
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "texts": pa.list_(pa.struct({"user": pa.string(), "assistant": pa.string()})),
    }
)
"""The columns of the Cauldron and of FineVision."""
VOCABULARY = """
the a of in on with two three small large red green blue white dark bright old new wooden round left right upper lower
near behind person child street house table window door tree river mountain bird dog car boat plate cup book letter
number chart line axis label map arrow standing walking holding showing facing between above below while because so
that which and but not is are was has
"""
WORDS = VOCABULARY.split()


@dataclass(frozen=True)
class Sample:
    """A row: one image and one conversation of a turn each."""

    image: bytes
    user: str
    assistant: str

    @property
    def nbytes(self) -> int:
        """Its payload: encoded image and text."""
        return len(self.image) + len(self.user.encode()) + len(self.assistant.encode())


@dataclass(frozen=True)
class DataSet:
    """What was written, and where. payload_nbytes: of encoded images and texts, without what formats add."""

    directory: Path
    num_rows: int
    payload_nbytes: int
    num_files: int

    @property
    def parquet(self) -> Path:
        """The directory of parquet files."""
        return self.directory / "parquet"

    @property
    def shards(self) -> Path:
        """The directory of tar shards."""
        return self.directory / "tar"

    @property
    def mds(self) -> Path:
        """The directory of MDS shards, which the peer itself writes."""
        return self.directory / "mds"

    def files(self) -> list[Path]:
        """All parquet files."""
        return sorted(self.parquet.glob("*.parquet"))

    def groups(self) -> Iterator[list[Sample]]:
        """The samples of each row group, read from the parquet files."""
        for path in self.files():
            with pq.ParquetFile(path) as file:
                for index in range(file.num_row_groups):
                    rows = file.read_row_group(index).to_pylist()
                    yield [Sample(row["images"][0]["bytes"], **row["texts"][0]) for row in rows]


def large_files(directory: Path, gigabytes: float) -> DataSet:
    """The data set of about that size, in 1e9 bytes, with tar shards; kept if it is there already."""
    per_file = GROUP_ROWS * GROUPS_PER_FILE
    num_rows = max(1, round(gigabytes * 1e9 / MEAN_NBYTES / GROUP_ROWS)) * GROUP_ROWS
    counts = [min(per_file, num_rows - start) for start in range(0, num_rows, per_file)]
    return _make(directory / "large", counts, (SMALLEST_NBYTES, LARGEST_NBYTES), with_shards=True)


def small_files(directory: Path, num_files: int) -> DataSet:
    """A data set of many small files; kept if it is there already."""
    return _make(directory / "small", [SMALL_FILE_ROWS] * num_files, SMALL_IMAGE_NBYTES, with_shards=False)


def _make(directory: Path, counts: list[int], sizes: tuple[int, int], with_shards: bool) -> DataSet:
    """Write one file for each count of rows."""
    description = {"version": VERSION, "counts": counts, "sizes": list(sizes), "with_shards": with_shards}
    manifest = directory / "manifest.json"
    if manifest.exists() and (found := json.loads(manifest.read_text()))["description"] == description:
        return DataSet(directory, **found["written"])
    if directory.exists() and any(directory.iterdir()):
        raise SystemExit(f"{directory} holds other data; remove it, or name another directory with --data")
    rng = np.random.default_rng(VERSION)
    images = [draw_jpeg(rng, target) for target in np.geomspace(*sizes, NUM_DRAWN).astype(int)]
    data_set, payload_nbytes = DataSet(directory, sum(counts), 0, len(counts)), 0
    data_set.parquet.mkdir(parents=True)
    if with_shards:
        data_set.shards.mkdir()
    first = 0
    for number, count in enumerate(counts):
        groups = [
            [sample_of(rng, images, row) for row in range(start, min(start + GROUP_ROWS, first + count))]
            for start in range(first, first + count, GROUP_ROWS)
        ]
        write_parquet(data_set.parquet / f"part-{number:05}.parquet", groups)
        if with_shards:
            write_shard(data_set.shards / f"part-{number:05}.tar", groups, first)
        payload_nbytes += sum(sample.nbytes for group in groups for sample in group)
        first += count
    written = asdict(DataSet(directory, sum(counts), payload_nbytes, len(counts)))
    del written["directory"]
    manifest.write_text(json.dumps({"description": description, "written": written}))
    return DataSet(directory, **written)


def draw_jpeg(rng: np.random.Generator, nbytes: int) -> bytes:
    """A JPEG of about that many bytes: smooth colours with noise."""
    pixels = nbytes / 0.6
    for _ in range(4):
        width = round(math.sqrt(pixels * 4 / 3))
        height = round(width * 3 / 4)
        colours = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
        noise = rng.integers(-NOISE, NOISE + 1, (height, width, 1), dtype=np.int16)
        noisy = np.clip(np.asarray(colours, dtype=np.int16) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
        found = file.getvalue()
        if abs(len(found) - nbytes) < 0.02 * nbytes:
            break
        pixels *= nbytes / len(found)
    return found


def sample_of(rng: np.random.Generator, images: list[bytes], row: int) -> Sample:
    """A random sample: a question and an answer, together some 100 to 150 tokens."""
    image = images[rng.integers(len(images))]
    comment = b"\xff\xfe" + struct.pack(">HQ", 10, row)
    question, answer = (
        " ".join(WORDS[k] for k in rng.integers(len(WORDS), size=rng.integers(low, high)))
        for low, high in ((8, 20), (45, 70))
    )
    return Sample(image[:2] + comment + image[2:], f"What of this: {question}?", f"{answer}.")


def write_parquet(path: Path, groups: list[list[Sample]]) -> None:
    """Write a file with one row group for each list of samples."""
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for group in groups:
            images = [[{"bytes": sample.image, "path": None}] for sample in group]
            texts = [[{"user": sample.user, "assistant": sample.assistant}] for sample in group]
            writer.write_table(pa.table({"images": images, "texts": texts}, SCHEMA))


def write_shard(path: Path, groups: list[list[Sample]], first: int) -> None:
    """Write a WebDataset shard: ``<row>.jpg`` and ``<row>.json`` for each sample."""
    with tarfile.open(path, "w") as tar:
        for row, sample in enumerate((sample for group in groups for sample in group), first):
            turns = [{"role": "user", "content": sample.user}, {"role": "assistant", "content": sample.assistant}]
            text = json.dumps({"messages": turns}).encode()
            for ending, data in (("jpg", sample.image), ("json", text)):
                member = tarfile.TarInfo(f"{row:08}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def warm(*directories: Path) -> None:
    """Read all files once, so that every reader after it finds them in the page cache."""
    for directory in directories:
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
