"""Images of a parquet column as views of Arrow's memory. Arrow's own scalars would copy each of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flowtrain.data.sources.bad_sample import BadSample
from flowtrain.data.sources.base import RawImage, image_beneath
from flowtrain.types.samples import RejectReason


class ImageColumn:
    """The images of some rows: a list for each row, or one; each as bytes, as a path, or as a struct of both.

    root: paths start from there. A view keeps the memory of all rows alive.
    """

    def __init__(self, column: pa.Array, root: str) -> None:
        self._root = root
        self._are_lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        self._row_valid = _valid(column)
        self._starts = column.offsets.to_numpy() if self._are_lists else np.arange(len(column) + 1)
        items = column.values if self._are_lists else column
        self._data: pa.Array | None = items if _is_binary(items.type) else None
        self._paths: pa.Array | None = None if _is_binary(items.type) else items
        if pa.types.is_struct(items.type):
            names = {field.name for field in items.type}
            self._data = items.field("bytes") if "bytes" in names else None
            self._paths = items.field("path") if "path" in names else None
        self._item_valid = _valid(items)
        if self._data is not None and not pa.types.is_null(self._data.type):
            self._data_valid = _valid(self._data)
            _, offsets, content = self._data.buffers()
            width = np.int64 if pa.types.is_large_binary(self._data.type) else np.int32
            self._offsets = np.frombuffer(offsets, width)[self._data.offset :] if offsets else np.zeros(1, width)
            self._content = memoryview(content) if content else memoryview(b"")
        else:
            self._data = None

    def of_row(self, row: int) -> list[RawImage]:
        """Return a row's images; raises BadSample."""
        if not self._row_valid[row]:
            return []
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        return [self._image(item, item - start) for item in range(start, end)]

    def described(self, row: int) -> list[dict[str, object]]:
        """Return a row's images as plain values: the number of bytes, and the path; None for what is not there."""
        if not self._row_valid[row]:
            return []
        return [
            {
                "bytes": self._nbytes(item) if self._item_valid[item] else None,
                "path": self._paths[item].as_py() if self._item_valid[item] and self._paths is not None else None,
            }
            for item in range(int(self._starts[row]), int(self._starts[row + 1]))
        ]

    def _nbytes(self, item: int) -> str | None:
        if self._data is None or not self._data_valid[item]:
            return None
        return f"{self._offsets[item + 1] - self._offsets[item]} bytes"

    def _image(self, item: int, index: int) -> RawImage:
        if self._item_valid[item]:
            if self._data is not None and self._data_valid[item]:
                return RawImage(data=self._content[self._offsets[item] : self._offsets[item + 1]])
            path = None if self._paths is None else self._paths[item].as_py()
            if path:
                return image_beneath(self._root, path, f"images[{index}]")
        raise BadSample(RejectReason.MISSING_IMAGE, f"images[{index}] has neither bytes nor a path")


def _is_binary(found: pa.DataType) -> bool:
    return bool(pa.types.is_binary(found) or pa.types.is_large_binary(found))


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    return array.is_valid().to_numpy(zero_copy_only=False)
