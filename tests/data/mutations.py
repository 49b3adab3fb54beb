"""Samples as real data has them: good ones, changed in one to three of the ways in which they go wrong.

A ``Draft`` is what a row says, before any source has read it, so that a source's own rows can be made of it too.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from PIL import Image

from flowtrain.data.sources.base import RawImage, RawSample, Turn

# In the structure of SmolLM2's: a system prompt of its own in front of the first message, and no markers.
OWN_SYSTEM_PROMPT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are of use.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the structure of Mistral's: raises for any order but user, assistant, user, ...
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)

ROLES = ("system", "user", "assistant")
IMAGE = "<image>"


@dataclass
class Draft:
    """A row: ``turns`` of (role, text), encoded ``images``, and its ``id``; ``changes``: the names of its mutations."""

    turns: list[tuple[str, str]]
    images: list[bytes]
    id: str | None = None
    changes: list[str] = field(default_factory=list)

    def raw(self) -> RawSample:
        """Return it as a source does that checks nothing."""
        # Every other image lies in a feeder's memory instead of in an object of its own.
        images = [data if index % 2 else memoryview(data) for index, data in enumerate(self.images)]
        turns = [Turn(role, text) for role, text in self.turns]  # type: ignore[arg-type]
        return RawSample(tuple(RawImage(data=data) for data in images), tuple(turns), self.id)


Mutation = Callable[[random.Random, Draft], None]


def drafts(seed: int, count: int) -> Iterator[Draft]:
    """Yield ``count`` mutated rows, the same ones for the same seed; each mutation comes first in its turn."""
    rng = random.Random(seed)
    for number in range(count):
        draft = _good(rng)
        draft.id = rng.choice([None, f"row-{number}", "\udcff" * 3, "x" * 5000])
        for mutation in (MUTATIONS[number % len(MUTATIONS)], *rng.choices(MUTATIONS, k=rng.randrange(3))):
            mutation(rng, draft)
            draft.changes.append(mutation.__name__)
        yield draft


def _good(rng: random.Random) -> Draft:
    images = [encoded(*rng.choice(KINDS)) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    turns = []
    for number in range(rng.choice([1, 1, 2, 3])):
        turns += [("user", _words(rng)), ("assistant", _words(rng))]
        if number == 0:
            turns[0] = ("user", IMAGE * len(images) + "\n" + turns[0][1])
    if rng.random() < 0.2:
        turns.insert(0, ("system", _words(rng)))
    return Draft(turns, images)


def _words(rng: random.Random) -> str:
    return " ".join(
        rng.choice(["What", "is", "in", "the", "picture?", "a", "cat", "猫", "Größe", "12,5", "\n"]) for _ in range(8)
    )


# --- images ---------------------------------------------------------------------------------------------------------

KINDS = [
    ("RGB", "JPEG", 40, 30), ("RGB", "PNG", 17, 33), ("L", "JPEG", 30, 30), ("CMYK", "JPEG", 20, 20),
    ("P", "PNG", 9, 9), ("RGBA", "PNG", 8, 50), ("LA", "PNG", 12, 12), ("1", "PNG", 30, 5), ("I;16", "PNG", 9, 9),
    ("RGB", "WEBP", 31, 14), ("RGBA", "WEBP", 15, 15), ("P", "GIF", 16, 16), ("RGB", "BMP", 14, 14),
    ("RGB", "TIFF", 14, 20), ("F", "TIFF", 9, 8), ("RGB", "PPM", 6, 7), ("1", "TIFF", 33, 8),
    ("RGB", "JPEG2000", 16, 16), ("RGB", "JPEG", 1, 1), ("RGB", "PNG", 1, 3000), ("RGB", "JPEG", 3000, 1),
]  # fmt: skip


@cache
def encoded(mode: str, fmt: str, width: int, height: int) -> bytes:
    """A picture of noise."""
    noise = np.random.default_rng(width * 4096 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    picture = picture.convert("L").convert(mode) if mode in ("I;16", "F") else picture.convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, fmt)
    return buffer.getvalue()


def png(width: int, height: int, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG whose header states a size, whose data is a few bytes, and with chunks of one's own before them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(num_tags: int, nbytes: int) -> bytes:
    """A TIFF of ``nbytes`` bytes whose tags, one by one, claim to hold nearly all of it."""
    known = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, 64)]
    tags = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in known]
    tags += [struct.pack("<HHII", 1000 + number, 7, nbytes - 16, 8) for number in range(num_tags)]
    return (b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(tags)).ljust(nbytes, b"\0")


ODD_IMAGES: tuple[bytes, ...] = (
    b"",
    b"no image",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    b"%PDF-1.4\n",
    b"GIF89a" + struct.pack("<HH", 0, 0) + b"\0\0\0;",
    b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;",
    b"P6 0 9 255\n",
    b"P6 99999999 99999999 255\n" + b"\0" * 30,
    b"P3 4 4 255\n" + b"9" * 300,
    b"BM" + b"\0" * 60,
    png(0, 0),
    png(1, 60_000),
    png(60_000, 1),
    png(9000, 9000),
    png(100_000, 100_000),
    png(2**31 - 1, 2**31 - 1),
    png(8, 8, (b"zTXt", b"k\0\0" + zlib.compress(b"\0" * (64 << 20), 9))),
    png(8, 8, (b"iCCP", b"k\0\0" + zlib.compress(b"\0" * (8 << 20), 9))),
    png(8, 8, *[(b"tEXt", b"k\0" + b"v" * 1000)] * 50),
    tiff(200, 1 << 16),
    tiff(0, 64),
    b"\xff\xd8\xff\xe1\xff\xff" + b"Exif\0\0II*\0\x08\0\0\0" + b"\xff" * 65500,
    b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\0\0\0\x10\0\0\0\xff\xff\xff\xff\xff\xff",
)


def image_bytes_flipped(rng: random.Random, draft: Draft) -> None:
    _change_image(rng, draft, lambda data: _flipped(rng, data, 1 + rng.randrange(8)))


def image_header_flipped(rng: random.Random, draft: Draft) -> None:
    _change_image(rng, draft, lambda data: _flipped(rng, data[:64], 2) + data[64:])


def image_truncated(rng: random.Random, draft: Draft) -> None:
    _change_image(rng, draft, lambda data: data[: rng.randrange(len(data) + 1)])


def image_with_a_hole(rng: random.Random, draft: Draft) -> None:
    def change(data: bytes) -> bytes:
        start = rng.randrange(len(data) + 1)
        length = rng.randrange(1 + len(data) // 2)
        return data[:start] + rng.choice([b"", b"\0" * length, b"\xff" * length]) + data[start + length :]

    _change_image(rng, draft, change)


def images_joined(rng: random.Random, draft: Draft) -> None:
    _change_image(rng, draft, lambda data: data[: rng.randrange(200)] + encoded(*rng.choice(KINDS)))


def image_odd(rng: random.Random, draft: Draft) -> None:
    _change_image(rng, draft, lambda data: rng.choice(ODD_IMAGES))


def image_lost(rng: random.Random, draft: Draft) -> None:
    del draft.images[:1]


def image_too_many(rng: random.Random, draft: Draft) -> None:
    draft.images += [encoded(*rng.choice(KINDS))] * rng.choice([1, 2, 200])


def images_many_and_placed(rng: random.Random, draft: Draft) -> None:
    count = rng.choice([5, 60, 600])
    draft.images += [encoded(*rng.choice(KINDS[:5]))] * count
    draft.turns.insert(0, ("user", IMAGE * count))


def _change_image(rng: random.Random, draft: Draft, change: Callable[[bytes], bytes]) -> None:
    if not draft.images:  # every mutation of an image needs one
        draft.images.append(encoded(*rng.choice(KINDS)))
        draft.turns.insert(0, ("user", IMAGE))
    place = rng.randrange(len(draft.images))
    draft.images[place] = change(draft.images[place])


def _flipped(rng: random.Random, data: bytes, count: int) -> bytes:
    changed = bytearray(data)
    for _ in range(count if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


# --- texts ----------------------------------------------------------------------------------------------------------

ODD_TEXTS: tuple[str, ...] = (
    "\ud800", "\udfff half", "a\udcffb", "\0", "\x1b[31m", "\ufdd0", "\ufdd1", "\ufdd2", "<im\ufdd0age>",
    "\ufffe\uffff", "\u202e\u2066", "\u200d" * 50, "a\u0301\u0301\u0301" * 40, "😀\ufe0f" * 30,
    "<|im_end|>", "<|im_start|>assistant\n", "<|im_<|im_end|>end|>", "<|im_end|>" * 200, "[INST]", "</s>", "<pad>",
    "<think>x</think>", IMAGE, "<image", "<IMAGE>", IMAGE * 40, "&lt;image&gt;", "{{ 1 / 0 }}", "{% generation %}",
    "{% endfor %}", "%s %d {0}", "\r\n\r\n", " \t\n\u3000\xa0", "", "\n" * 500, "\\ud800", "9" * 400, "x" * 3000,
    "word " * 700, "猫" * 2000, "x" * 200_000, "猫" * 50_000,
)  # fmt: skip


def text_odd(rng: random.Random, draft: Draft) -> None:
    _change_text(rng, draft, lambda text: rng.choice(ODD_TEXTS))


def text_with_something_odd(rng: random.Random, draft: Draft) -> None:
    def change(text: str) -> str:
        place = rng.randrange(len(text) + 1)
        return text[:place] + rng.choice(ODD_TEXTS) + text[place:]

    _change_text(rng, draft, change)


def text_of_any_characters(rng: random.Random, draft: Draft) -> None:
    def change(text: str) -> str:
        return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x10000), rng.randrange(0x110000)]))
                       for _ in range(rng.randrange(40)))  # fmt: skip

    _change_text(rng, draft, change)


def text_shuffled(rng: random.Random, draft: Draft) -> None:
    _change_text(rng, draft, lambda text: "".join(rng.sample(text, len(text))))


def text_cut(rng: random.Random, draft: Draft) -> None:
    _change_text(rng, draft, lambda text: text[rng.randrange(len(text) + 1) :])


def _change_text(rng: random.Random, draft: Draft, change: Callable[[str], str]) -> None:
    if not draft.turns:
        return
    place = rng.randrange(len(draft.turns))
    role, text = draft.turns[place]
    draft.turns[place] = (role, change(text))


# --- conversations --------------------------------------------------------------------------------------------------


def turn_lost(rng: random.Random, draft: Draft) -> None:
    if draft.turns:
        del draft.turns[rng.randrange(len(draft.turns))]


def turn_twice(rng: random.Random, draft: Draft) -> None:
    place = rng.randrange(len(draft.turns) + 1)
    draft.turns[place:place] = draft.turns[place : place + 1]


def turns_shuffled(rng: random.Random, draft: Draft) -> None:
    rng.shuffle(draft.turns)


def roles_changed(rng: random.Random, draft: Draft) -> None:
    draft.turns = [(rng.choice(ROLES), text) for _, text in draft.turns]


def roles_all_one(rng: random.Random, draft: Draft) -> None:
    role = rng.choice(ROLES)
    draft.turns = [(role, text) for _, text in draft.turns]


def assistant_first(rng: random.Random, draft: Draft) -> None:
    draft.turns.insert(0, ("assistant", _words(rng)))


def turns_without_number(rng: random.Random, draft: Draft) -> None:
    short = [("user", ""), ("assistant", "y")]
    draft.turns = rng.choice([[], draft.turns[:4] * 50, draft.turns[:4] + short * 200, short * 5000])


MUTATIONS: Sequence[Mutation] = (
    image_bytes_flipped, image_header_flipped, image_truncated, image_with_a_hole, images_joined, image_odd, image_lost,
    image_too_many, images_many_and_placed, text_odd, text_with_something_odd, text_of_any_characters, text_shuffled,
    text_cut, turn_lost, turn_twice, turns_shuffled, roles_changed, roles_all_one, assistant_first,
    turns_without_number,
)  # fmt: skip
