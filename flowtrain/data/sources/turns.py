"""Conversations as plain lists of objects: ``role`` and ``content``, or LLaVA's ``from`` and ``value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.data.sources.bad_sample import BadSample, malformed
from flowtrain.data.sources.base import IMAGE_PLACEHOLDER, RawImage, RawSample, Role, Turn, normalise
from flowtrain.types.samples import RejectReason

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_IMAGE_TYPES = ("image", "image_url")

ImageItem = int | str | None
"""What an image in a turn's content refers to: an index into the sample's images, a path, or (None) the next one."""


def parse_turns(value: object, key: str) -> tuple[list[Turn], list[ImageItem]]:
    """Return the turns and the images that their content lists; raises BadSample, which names ``key``."""
    if not isinstance(value, list) or not value:
        found = "an empty one" if value == [] else type(value).__name__
        raise malformed(f"{key}: expected a list of turns, found {found}")
    turns: list[Turn] = []
    items: list[ImageItem] = []
    for index, turn in enumerate(value):
        where = f"{key}[{index}]"
        if not isinstance(turn, dict):
            raise malformed(f"{where}: expected an object, found {type(turn).__name__}")
        role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
        speaker, content = turn.get(role_key), turn.get(text_key)
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise malformed(f"{where}.{role_key}: expected {', '.join(_ROLES)}, found {str(speaker)[:80]!r}")
        # ms-swift's; a turn that is not the assistant's has no loss anyway.
        if role == "assistant" and (loss := turn.get("loss")) is not None and not loss:
            raise malformed(f"{where}.loss = {loss}: not supported, every assistant turn is trained; remove the row")
        turns.append(Turn(role, _text(content, f"{where}.{text_key}", items)))
    return turns, items


def paths_in(items: Sequence[ImageItem]) -> list[str]:
    """Return the paths that the content names, if it names each of its images by one."""
    paths = [item for item in items if isinstance(item, str)]
    return paths if len(paths) == len(items) else []


def join_images(
    images: Sequence[RawImage], turns: Sequence[Turn], items: Sequence[ImageItem], id: str | None
) -> RawSample:
    """Put images in the order of the content's items, and check the text; raises BadSample.

    images: the sample's own, or those that ``paths_in(items)`` names. items: from ``parse_turns``.
    """
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError as error:
            raise malformed(f"the {turn.role} turn's text is no Unicode: {error.reason} at {error.start}") from error
    indices = [item for item in items if isinstance(item, int)]
    if indices and len(indices) == len(items):
        wrong = [index for index in indices if not 0 <= index < len(images)]
        if wrong:
            raise BadSample(RejectReason.PLACEHOLDER_MISMATCH, f"image {wrong[0]} is named, of {len(images)} images")
        images = [images[index] for index in indices]
    # Ids go into logs, where a lone surrogate could not be written.
    return normalise(images, turns, id if id is None else id.encode(errors="backslashreplace").decode()[:200])


def _text(content: object, where: str, items: list[ImageItem]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed(f"{where}: expected a string or a list of items, found {type(content).__name__}")
    pieces = []
    for index, item in enumerate(content):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text" and isinstance(item.get("text"), str):
            pieces.append(item["text"])
        elif kind in _IMAGE_TYPES:
            pieces.append(IMAGE_PLACEHOLDER)
            items.append(_image_item(item))
        else:
            raise malformed(f"{where}[{index}]: expected an item of type text or image, found {str(item)[:80]!r}")
    return "".join(pieces)


def _image_item(item: Mapping[str, Any]) -> ImageItem:
    for key in ("image", "path", "url", "image_url"):
        value = item.get(key)
        if isinstance(value, dict):
            value = value.get("url") or value.get("path")
        if isinstance(value, str) and value:
            return value
    index = item.get("index")
    return index if isinstance(index, int) else None
