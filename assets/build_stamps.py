"""Build a captioned data set from Debian's package of Tux Paint's stamps: photographs and drawings with a caption each.

    python assets/build_stamps.py --deb-dir DIR --out DIR

The package is fetched into --deb-dir with `apt-get download` if it is not there, and unpacked without installing it.
Its pictures have several licences, among them the GPL, so nothing of them is kept in this repository; the package's
`copyright` file names them. Writes train.parquet and eval.parquet; pictures with the same caption are in one of them.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from build_openclipart import SCHEMA, crop, find_deb, on_white, package_version
from PIL import Image

SEED = 31
PACKAGE = "tuxpaint-stamps-default"
STAMPS = Path("usr/share/tuxpaint/stamps")
NUM_HELD_OUT = 160
SIDE = 224
MOST_SOURCE_PIXELS = 12_000_000
CAPTION = re.compile(r"[A-Z][\x20-\x7e]{2,100}")
"""English, of one line."""
ASK = ("What is this a picture of?", "Caption this picture.", "What do you see?", "What does this picture show?")


@dataclass(frozen=True)
class Stamp:
    """A picture of the package and its English caption."""

    png: Path
    caption: str


def read_stamps(root: Path) -> list[Stamp]:
    """Every PNG beneath ``root`` whose text file begins with an English caption, by path.

    A text file's first line is English; the others are translations. SVGs have text files too and are passed over.
    """
    found = []
    for text in sorted(root.rglob("*.txt")):
        png = text.with_suffix(".png")
        lines = text.read_text(encoding="utf-8", errors="replace").splitlines()
        caption = " ".join(lines[0].split()) if lines else ""
        if png.is_file() and CAPTION.fullmatch(caption):
            found.append(Stamp(png, caption if caption[-1] in ".!?" else caption + "."))
    return found


def split(stamps: list[Stamp], num_held_out: int) -> dict[str, list[Stamp]]:
    """Draw captions for evaluation until they have enough pictures; both parts are in random order."""
    rng, by_caption = random.Random(SEED), defaultdict(list)
    for stamp in stamps:
        by_caption[stamp.caption.lower()].append(stamp)
    parts: dict[str, list[Stamp]] = {"train": [], "eval": []}
    for caption in rng.sample(sorted(by_caption), len(by_caption)):
        parts["eval" if len(parts["eval"]) < num_held_out else "train"] += by_caption[caption]
    for part in parts.values():
        rng.shuffle(part)
    return parts


def encoded(stamp: Stamp) -> bytes | None:
    """The picture on a white square, as JPEG; None if it is too large."""
    with Image.open(stamp.png) as image:
        if image.width * image.height > MOST_SOURCE_PIXELS:
            return None
    picture = crop(on_white(stamp.png))
    side = max(picture.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    buffer = io.BytesIO()
    square.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write(part: list[Stamp], to: Path) -> int:
    """Write the samples, a question each; returns how many."""
    rng, rows = random.Random(SEED), []
    for stamp in part:
        data = encoded(stamp)
        if data is not None:
            image = {"bytes": data, "path": f"{stamp.png.stem}.jpg"}
            rows.append({"images": [image], "texts": [{"user": rng.choice(ASK), "assistant": stamp.caption}]})
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), to, row_group_size=64, compression="zstd")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb-dir", type=Path, required=True, help="folder of the package")
    parser.add_argument("--out", type=Path, required=True, help="folder for the data set")
    args = parser.parse_args()
    for folder in (args.deb_dir, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    deb = find_deb(args.deb_dir, PACKAGE)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg-deb", "-x", str(deb.resolve()), scratch], check=True)
        parts = split(read_stamps(Path(scratch) / STAMPS), NUM_HELD_OUT)
        counts = {name: write(part, args.out / f"{name}.parquet") for name, part in parts.items()}
    print(f"{PACKAGE} {package_version(deb)}, {counts['train']} captioned pictures and {counts['eval']} held out")


if __name__ == "__main__":
    main()
