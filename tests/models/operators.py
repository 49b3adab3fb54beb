"""Watching which operators run, beneath autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Counts operators by name (``aten::mm``) and keeps the sizes, in elements, of the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.name().partition(".")[0]] += 1
        self.sizes += [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result

    @property
    def num_products(self) -> int:
        """Matrix products of linear layers."""
        return self.counts["aten::mm"] + self.counts["aten::addmm"]

    def num_calls(self, matches: Callable[[str], bool]) -> int:
        """Calls of operators whose name matches."""
        return sum(count for name, count in self.counts.items() if matches(name))
