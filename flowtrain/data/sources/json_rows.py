"""One sample as a JSON object, in the keys of LLaVA, ms-swift and LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from flowtrain.data.sources.bad_sample import errors_of_row, malformed
from flowtrain.data.sources.base import RawImage, RawSample, Turn
from flowtrain.data.sources.turns import join_images, parse_turns, paths_in

_CONVERSATIONS = ("conversations", "messages")
_IMAGES = ("image", "images")
_UNSUPPORTED = ("videos", "video", "audios", "audio")

ImageOf = Callable[[str, str], RawImage]
"""Returns the image of a path; the second argument names it in messages. Raises BadSample."""


def has_turns(record: object) -> bool:
    """Whether an object is a sample, and not only data about one."""
    return isinstance(record, dict) and any(record.get(key) is not None for key in _CONVERSATIONS)


def parse_row(record: object, image_of: ImageOf, unnamed: Sequence[RawImage] = (), id: str | None = None) -> RawSample:
    """Return the sample of an object; raises BadSample.

    unnamed: the images if the object names none. id: the sample's name if the object has none.
    """
    if not isinstance(record, dict):
        raise malformed(f"expected an object, found {type(record).__name__}")
    id = _id(record) or id
    with errors_of_row(id):
        if unsupported := [key for key in _UNSUPPORTED if record.get(key)]:
            raise malformed(f"{' and '.join(unsupported)}: not supported, only images and text are; remove the row")
        turns, items = parse_turns(*_conversation(record))
        if isinstance(system := record.get("system"), str) and system and turns[0].role != "system":
            turns.insert(0, Turn("system", system))
        paths, key = _image_paths(record)
        if not paths:
            paths, key = paths_in(items), "content"
        images = [image_of(path, f"{key}[{index}]") for index, path in enumerate(paths)] if paths else unnamed
        return join_images(images, turns, items, id)


def json_fault(error: ValueError | RecursionError, place: int = 0, unit: str = "character") -> str:
    """Say what is wrong with JSON and where, once. place: of the text's start, in these units."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)[:200]
    at = len(error.doc[: error.pos].encode(errors="surrogatepass")) if unit == "byte" else error.pos
    return f"{error.msg.removesuffix(' at')} at {unit} {place + at}"


def _conversation(record: dict[str, Any]) -> tuple[object, str]:
    given = [key for key in _CONVERSATIONS if record.get(key) is not None]
    if len(given) == 2:
        raise malformed("both conversations and messages are given; keep one")
    if not given:
        keys = ", ".join(str(key) for key in record)[:200]
        raise malformed(f"neither conversations nor messages is given; found keys: {keys or 'none'}")
    return record[given[0]], given[0]


def _image_paths(record: dict[str, Any]) -> tuple[list[str], str]:
    given = [key for key in _IMAGES if record.get(key) not in (None, "", [])]
    if not given:
        return [], ""
    if len(given) == 2:
        raise malformed("both image and images are given; keep one")
    value = record[given[0]]
    items = value if isinstance(value, list) else [value]
    paths = [path for item in items if isinstance(path := item.get("path") if isinstance(item, dict) else item, str)]
    if not all(paths) or len(paths) != len(items):
        raise malformed(f"{given[0]}: expected a path or a list of paths, found {str(value)[:80]!r}")
    return paths, given[0]


def _id(record: dict[str, Any]) -> str | None:
    value = record.get("id")
    return str(value) if isinstance(value, str | int) else None
