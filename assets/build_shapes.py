"""Draw the captioned shapes under assets/shapes. What is said of a picture can be seen in it.

    python assets/build_shapes.py [--out DIR]

A picture shows one shape, several alike, or two that differ, side by side or one above the other. The same seed gives
the same pictures and texts, for one version each of Pillow and pyarrow.
"""

from __future__ import annotations

import argparse
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from build_openclipart import SCHEMA
from PIL import Image, ImageDraw

SEED = 23
NUM_SAMPLES = {"train": 1600, "eval": 128}
SUPERSAMPLING = 4
SIDES = (96, 112, 128, 160)
"""Sides of the square pictures, in pixels."""
COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 30),
    "yellow": (244, 212, 50),
    "green": (45, 155, 65),
    "blue": (45, 90, 215),
    "purple": (140, 60, 175),
    "brown": (125, 78, 45),
    "black": (30, 30, 30),
}
PLURALS = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "star": "stars",
    "cross": "crosses",
    "ring": "rings",
}
KINDS = tuple(PLURALS)
LOOKS = tuple((kind, colour) for kind in KINDS for colour in COLOURS)
NUMBERS = ("no", "one", "two", "three", "four")
LAYOUTS = ("alike", "left of", "above")
LOW, HIGH = 0.27, 0.73
CORNERS = tuple((x, y) for x in (LOW, HIGH) for y in (LOW, HIGH))
PAIRS = {"left of": ((LOW, 0.5), (HIGH, 0.5)), "above": ((0.5, LOW), (0.5, HIGH))}

ASK_CAPTION = (
    "Which shapes do you see?", "Describe the shapes.", "What has been drawn on the paper?", "Say what lies where.",
)  # fmt: skip
ASK_NUMBER = ("How many shapes are there?", "Count the shapes.")
ASK_COLOUR = ("Which colour is it?", "What colour has been used?")

Colour = tuple[int, int, int]
Point = tuple[float, float]


def regular(corners: int, turn: float = 0.0) -> tuple[Point, ...]:
    """Corners of a regular polygon of radius 1; turn: degrees."""
    angles = (math.radians(turn + 360 * number / corners) for number in range(corners))
    return tuple((math.cos(angle), math.sin(angle)) for angle in angles)


def star() -> tuple[Point, ...]:
    points = zip(regular(5, -90), regular(5, -54), strict=True)
    return tuple(point for outer, inner in points for point in (outer, (0.42 * inner[0], 0.42 * inner[1])))


def cross(half_width: float = 0.3, length: float = 0.95) -> tuple[Point, ...]:
    arm = ((half_width, half_width), (length, half_width), (length, -half_width))
    turns = ((1, 0), (0, -1), (-1, 0), (0, 1))  # cosine and sine of each arm's angle, anticlockwise on paper
    return tuple((x * c - y * s, x * s + y * c) for c, s in turns for x, y in arm)


OUTLINES = {
    "circle": regular(40),
    "square": regular(4, 45),
    "triangle": regular(3, -90),
    "star": star(),
    "cross": cross(),
    "ring": regular(40),
}
HOLE = 0.55
"""Of a ring, in radii."""


@dataclass(frozen=True)
class Shape:
    """One shape. x, y, radius: in sides of the picture; angle: in degrees."""

    kind: str
    colour: str
    shade: Colour
    x: float
    y: float
    radius: float
    angle: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows. layout: ``alike``, or where the first of two shapes is, seen from the second."""

    side: int
    paper: Colour
    shapes: tuple[Shape, ...]
    layout: str

    @property
    def caption(self) -> str:
        first, count = self.shapes[0], len(self.shapes)
        if self.layout != "alike":
            return f"{with_article(first.name)} {self.layout} {with_article(self.shapes[1].name).lower()}."
        if count == 1:
            return f"{with_article(first.name)}."
        return f"{NUMBERS[count].capitalize()} {first.colour} {PLURALS[first.kind]}."


def with_article(name: str) -> str:
    return f"{'An' if name[0] in 'aeiou' else 'A'} {name}"


def random_scene(rng: random.Random) -> Scene:
    """A scene whose shapes lie inside the picture and apart from each other."""
    layout = rng.choice(("alike", *LAYOUTS))  # as many scenes of one kind of shape as of two
    if layout == "alike":
        count = rng.choice((1, 1, 2, 3, 4))
        looks = [rng.choice(LOOKS)] * count
        places, radii, spread = rng.sample(CORNERS, count), (0.11, 0.17), 0.05
        if count == 1:
            places, radii, spread = [(0.5, 0.5)], (0.17, 0.34), 0.12
    else:
        looks, places, radii, spread = rng.sample(LOOKS, 2), list(PAIRS[layout]), (0.12, 0.17), 0.05
    shapes = tuple(
        Shape(
            kind=kind,
            colour=colour,
            shade=shade_of(colour, rng),
            x=x + rng.uniform(-spread, spread),
            y=y + rng.uniform(-spread, spread),
            radius=rng.uniform(*radii),
            angle=rng.uniform(-15, 15),
        )
        for (kind, colour), (x, y) in zip(looks, places, strict=True)
    )
    paper = (rng.randint(232, 255), rng.randint(232, 255), rng.randint(232, 255))
    return Scene(rng.choice(SIDES), paper, shapes, layout)


def shade_of(colour: str, rng: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, value + rng.randint(-14, 14))) for value in COLOURS[colour])
    return red, green, blue


def draw(scene: Scene) -> Image.Image:
    side = scene.side * SUPERSAMPLING
    canvas = Image.new("RGB", (side, side), scene.paper)
    pen = ImageDraw.Draw(canvas)
    for shape in scene.shapes:
        pen.polygon(placed(shape, OUTLINES[shape.kind], side), fill=shape.shade)
        if shape.kind == "ring":
            hole = tuple((HOLE * x, HOLE * y) for x, y in OUTLINES["ring"])
            pen.polygon(placed(shape, hole, side), fill=scene.paper)
    return canvas.reduce(SUPERSAMPLING)


def placed(shape: Shape, outline: tuple[Point, ...], side: int) -> list[Point]:
    """An outline where the shape is, in pixels."""
    c, s = math.cos(math.radians(shape.angle)), math.sin(math.radians(shape.angle))
    turned = ((x * c - y * s, x * s + y * c) for x, y in outline)
    return [(side * (shape.x + shape.radius * x), side * (shape.y + shape.radius * y)) for x, y in turned]


def question_and_answer(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question, more often than not for the caption, and what the picture answers."""
    first, count = scene.shapes[0], len(scene.shapes)
    asked = rng.random()
    if asked < 0.7:
        return rng.choice(ASK_CAPTION), scene.caption
    if asked < 0.8:
        return rng.choice(ASK_NUMBER), f"{NUMBERS[count].capitalize()}."
    if scene.layout == "alike":
        return rng.choice(ASK_COLOUR), f"{first.colour.capitalize()}."
    return f"What is {scene.layout} the {scene.shapes[1].name}?", f"{with_article(first.name)}."


def encoded(image: Image.Image) -> bytes:
    """A palette PNG."""
    buffer = io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def samples(split: str) -> list[tuple[Scene, str, str]]:
    """Scene, question and answer of each sample of ``train`` or ``eval``."""
    rng = random.Random(f"{SEED}/{split}")
    found = []
    for _ in range(NUM_SAMPLES[split]):
        scene = random_scene(rng)
        found.append((scene, *question_and_answer(scene, rng)))
    return found


def write(split: str, to: Path) -> None:
    rows = [
        {
            "images": [{"bytes": encoded(draw(scene)), "path": f"{split}/{number}.png"}],
            "texts": [{"user": question, "assistant": answer}],
        }
        for number, (scene, question, answer) in enumerate(samples(split))
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), to, row_group_size=64, compression="zstd")
    print(f"{to}: {len(rows)} samples, {to.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent / "shapes"
    parser.add_argument("--out", type=Path, default=default, help="folder for the data set")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split in NUM_SAMPLES:
        write(split, args.out / f"{split}.parquet")


if __name__ == "__main__":
    main()
