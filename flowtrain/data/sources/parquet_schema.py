"""Which columns of a parquet file hold a sample, and whether their types fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from flowtrain.config.data import ColumnsConfig
from flowtrain.errors import DataError

_IMAGES = (
    "list of binary, of struct<bytes: binary, path: string> or of string (paths), or one of these for a single image"
)
_TEXTS = "list of struct<user: string, assistant: string>"
_MESSAGES = (
    "list of struct<role: string, content: string or list of struct<type: string, text: string>>, "
    "list of struct<from: string, value: string>, or the same as JSON text"
)
_ID = "id"


@dataclass(frozen=True, slots=True)
class Selection:
    """The columns that are read."""

    images: str
    turns: str
    are_texts: bool
    """Whether ``turns`` has pairs of user and assistant, not messages."""
    id: str | None
    """The column of the samples' names, if there is one."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them."""
        return (self.images, self.turns) if self.id is None else (self.images, self.turns, self.id)


def select(path: str, schema: pa.Schema, columns: ColumnsConfig) -> Selection:
    """Return the columns that hold a sample; raises DataError that names the file if one is missing or does not fit."""
    are_texts = columns.texts in schema.names or columns.messages not in schema.names
    turns = columns.texts if are_texts else columns.messages
    _check(path, schema, columns.images, accepts_images, _IMAGES)
    if are_texts:
        _check(path, schema, turns, accepts_texts, _TEXTS)
    else:
        _check(path, schema, turns, accepts_messages, _MESSAGES)
    has_id = schema.names.count(_ID) == 1 and (
        _is_string(schema.field(_ID).type) or pa.types.is_integer(schema.field(_ID).type)
    )
    return Selection(columns.images, turns, are_texts, _ID if has_id else None)


def accepts_images(found: pa.DataType) -> bool:
    """Whether a column of this type can hold images; null: a file of text-only samples."""
    item = found.value_type if _is_list(found) else found
    if not pa.types.is_struct(item):
        return _is_binary(item) or _is_string(item)
    fields = {field.name: field.type for field in item}
    known = fields.keys() & {"bytes", "path"}
    return bool(known) and _is_binary(fields.get("bytes", pa.null())) and _is_string(fields.get("path", pa.null()))


def accepts_texts(found: pa.DataType) -> bool:
    """Whether a column of this type can hold pairs of user and assistant."""
    return all(_is_string(field) for field in _fields(found, ("user", "assistant")))


def accepts_messages(found: pa.DataType) -> bool:
    """Whether a column of this type can hold messages."""
    if _is_string(found):
        return True
    role, content = _fields(found, ("role", "content"))
    if _is_string(role) and (_is_string(content) or _is_string(_fields(content, ("type",))[0])):
        return True
    return all(_is_string(field) for field in _fields(found, ("from", "value")))


def _check(path: str, schema: pa.Schema, column: str, accepts: Callable[[pa.DataType], bool], expected: str) -> None:
    count = schema.names.count(column)
    if count == 0:
        raise DataError(
            f"{path}: column {column!r} is missing (found {', '.join(schema.names)}); expected {expected}; name "
            "another column under the source's columns"
        )
    if count > 1:
        raise DataError(f"{path}: {count} columns are named {column!r}; write the file with one")
    found = schema.field(column).type
    if not accepts(found):
        raise DataError(f"{path}: column {column!r} has type {found}; expected {expected}")


def _fields(found: pa.DataType, names: tuple[str, ...]) -> list[pa.DataType]:
    """Return the types of these fields of a list's structs; a boolean, which fits nothing, for one that is missing."""
    fields = {}
    if _is_list(found) and pa.types.is_struct(found.value_type):
        fields = {field.name: field.type for field in found.value_type}
    return [fields.get(name, pa.bool_()) for name in names]


def _is_list(found: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found))


def _is_binary(found: pa.DataType) -> bool:
    return bool(pa.types.is_binary(found) or pa.types.is_large_binary(found) or pa.types.is_null(found))


def _is_string(found: pa.DataType) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_null(found))
