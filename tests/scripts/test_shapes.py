"""The quickstart's drawings: what is said of a picture can be seen in it, and the shipped encoder sees it."""

from __future__ import annotations

import hashlib
import io
import math
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from build_encoder import labels_of, patch_labels
from build_shapes import (
    COLOURS,
    KINDS,
    LAYOUTS,
    NUM_SAMPLES,
    NUMBERS,
    PLURALS,
    Scene,
    draw,
    question_and_answer,
    random_scene,
    samples,
)
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, SiglipVisionModel

ROOT = Path(__file__).resolve().parents[2]
SHAPES, ENCODER = ROOT / "assets" / "shapes", ROOT / "assets" / "encoder"
MOST_NBYTES = 5_000_000

scenes = st.integers(0, 2**32).map(lambda seed: random_scene(random.Random(seed)))


def nearest_colours(image: Image.Image) -> np.ndarray:
    """Index of each pixel's nearest colour, ``len(COLOURS)`` for paper; ``[side, side]``."""
    palette = np.array([*COLOURS.values(), (244, 244, 244)], dtype=np.float32)
    pixels = np.asarray(image, dtype=np.float32)
    return np.linalg.norm(pixels[:, :, None] - palette, axis=-1).argmin(-1)


def areas(scene: Scene) -> dict[str, int]:
    """Pixels of each colour."""
    found = np.bincount(nearest_colours(draw(scene)).ravel(), minlength=len(COLOURS) + 1)
    return dict(zip(COLOURS, found.tolist(), strict=False))


@given(scenes)
def test_shapes_lie_inside_and_apart(scene: Scene) -> None:
    for index, shape in enumerate(scene.shapes):
        assert shape.radius <= min(shape.x, shape.y) and max(shape.x, shape.y) + shape.radius <= 1
        for other in scene.shapes[:index]:
            assert math.hypot(shape.x - other.x, shape.y - other.y) > shape.radius + other.radius


@given(scenes)
def test_a_caption_names_what_is_drawn(scene: Scene) -> None:
    drawn, first = areas(scene), scene.shapes[0]
    named = {shape.colour for shape in scene.shapes}
    assert all(drawn[colour] > 0.004 * scene.side**2 for colour in named), "each named colour is there"
    # Where a shape's edge meets the paper, a few pixels are in between.
    edge_pixels = 8 * len(scene.shapes) * scene.side
    assert sum(area for colour, area in drawn.items() if colour not in named) < edge_pixels
    words = scene.caption.rstrip(".").lower()
    if scene.layout == "alike":
        count = len(scene.shapes)
        alone = f"{'an' if first.colour == 'orange' else 'a'} {first.name}"
        assert words == (alone if count == 1 else f"{NUMBERS[count]} {first.colour} {PLURALS[first.kind]}")
    else:
        second = scene.shapes[1]
        assert (first.kind, first.colour) != (second.kind, second.colour)
        left, above = second.x - first.x, second.y - first.y
        assert (left > above) == (scene.layout == "left of") and max(left, above) > 0.3
        before, _, after = words.partition(f" {scene.layout} ")
        assert before.endswith(first.name) and after.endswith(second.name)


@given(scenes, st.integers(0, 2**32))
def test_an_answer_belongs_to_its_question(scene: Scene, seed: int) -> None:
    question, answer = question_and_answer(scene, random.Random(seed))
    if "how many" in question.lower() or "count" in question.lower():
        assert answer == f"{NUMBERS[len(scene.shapes)].capitalize()}."
    elif "colour" in question:
        assert {shape.colour for shape in scene.shapes} == {answer.rstrip(".").lower()}
    elif question.startswith("What is "):
        assert question == f"What is {scene.layout} the {scene.shapes[1].name}?" and scene.shapes[0].name in answer
    else:
        assert answer == scene.caption


@given(scenes)
def test_labels_are_those_of_the_scene(scene: Scene) -> None:
    labels, patches = labels_of(scene), patch_labels(scene)
    assert KINDS[labels["kind"]] == scene.shapes[0].kind and labels["number"] == len(scene.shapes) - 1
    assert LAYOUTS[labels["arrangement"]] == scene.layout
    assert (labels["other kind"] == len(KINDS)) == (scene.layout == "alike")
    shown = {list(COLOURS)[index] for index in patches["patch's colour"] if index < len(COLOURS)}
    assert shown <= {shape.colour for shape in scene.shapes}


def stored(split: str) -> list[dict[str, object]]:
    return pq.read_table(SHAPES / f"{split}.parquet").to_pylist()


@pytest.mark.parametrize("split", NUM_SAMPLES)
def test_the_stored_samples_are_the_scripts(split: str) -> None:
    rows, drawn = stored(split), samples(split)
    assert [(row["texts"][0]["user"], row["texts"][0]["assistant"]) for row in rows] == [
        (question, answer) for _, question, answer in drawn
    ]
    for row, (scene, _, _) in list(zip(rows, drawn, strict=True))[::40]:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        assert image.size == (scene.side, scene.side)
        difference = np.abs(np.asarray(image, dtype=float) - np.asarray(draw(scene), dtype=float))
        assert difference.mean() < 4, "a palette is near the colours that were drawn"


def test_no_held_out_picture_is_trained_on() -> None:
    digests = {
        split: {hashlib.sha256(row["images"][0]["bytes"]).digest() for row in stored(split)} for split in NUM_SAMPLES
    }
    assert len(digests["eval"]) == NUM_SAMPLES["eval"] and not digests["eval"] & digests["train"]


@pytest.fixture(scope="module")
def features() -> dict[str, tuple[torch.Tensor, list[Scene]]]:
    """Mean features of pictures, ``[pictures, width]``, by split."""
    processor = AutoImageProcessor.from_pretrained(ENCODER, backend="pil")
    encoder = SiglipVisionModel.from_pretrained(ENCODER, dtype=torch.float32).eval()
    found = {}
    for split, count in (("train", 480), ("eval", 128)):
        drawn = [scene for scene, _, _ in samples(split)[:count]]
        with torch.inference_mode():
            pixels = processor(images=[draw(scene) for scene in drawn], return_tensors="pt")["pixel_values"]
            hidden = encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-1]
        found[split] = (hidden.mean(1), drawn)
    return found


@pytest.mark.parametrize(("label", "at_least"), [("colour", 0.8), ("kind", 0.5), ("number", 0.6), ("arrangement", 0.8)])
def test_the_shipped_encoder_sees(
    features: dict[str, tuple[torch.Tensor, list[Scene]]], label: str, at_least: float
) -> None:
    """A linear map of its mean feature, fitted on pictures of the training set, names held-out ones."""
    (known, known_scenes), (asked, asked_scenes) = features["train"], features["eval"]
    targets = torch.tensor([labels_of(scene)[label] for scene in known_scenes])
    ones = torch.ones(len(known), 1)
    known, asked = torch.cat([known, ones], 1), torch.cat([asked, ones[: len(asked)]], 1)
    ridge = known.T @ known + 1.0 * torch.eye(known.shape[1])
    weights = torch.linalg.solve(ridge, known.T @ torch.nn.functional.one_hot(targets).float())
    said = (asked @ weights).argmax(1)
    truth = torch.tensor([labels_of(scene)[label] for scene in asked_scenes])
    assert (said == truth).float().mean().item() >= at_least


def test_the_shipped_encoder_is_small() -> None:
    assert sum(file.stat().st_size for file in ENCODER.iterdir()) <= MOST_NBYTES
