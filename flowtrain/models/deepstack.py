"""DeepStack (Meng et al., 2024): rows of features enter the hidden states after the first decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.models.parallel_layers import enter_region


@contextmanager
def rows_added(
    layers: Sequence[nn.Module], levels: Sequence[Tensor], index: Tensor, mesh: DeviceMesh | None
) -> Iterator[None]:
    """Add rows to what layers that are called inside return: the k-th level after the k-th layer.

    levels: ``[R, H]`` each, the same on all tensor parallel ranks. index: int64 ``[R]``, the token of each row. mesh:
    ranks that split hidden states by tokens; None: each has all. With fewer layers than levels (a profile of one layer)
    the last layer gets the rest.

    They are hooks, outside of what a memory strategy recomputes.
    """
    last = len(layers) - 1
    handles = [
        layers[min(number, last)].register_forward_hook(partial(_add, rows, index, mesh))
        for number, rows in enumerate(levels)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(rows: Tensor, index: Tensor, mesh: DeviceMesh | None, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if mesh is None:
        return output.index_add(1, index, rows.to(output.dtype)[None])
    # Each rank adds the rows of its own slice, so the rows' gradient is a sum over the ranks.
    length = output.shape[1]
    place = index - mesh.get_local_rank() * length
    is_here = (place >= 0) & (place < length)
    own = enter_region(rows, mesh).to(output.dtype) * is_here[:, None]
    return output.index_add(1, place.clamp(0, length - 1), own[None])
