"""Formulas in a configuration: arithmetic over a few names, read without running any code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

NAMES = ("flops", "nbytes", "sent_nbytes", "F", "B_mem", "B_net", "efficiency")
"""Work of an operator (FLOPs, bytes of memory, bytes sent), rates of its device per second, share that is reached."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS = ("max", "min")
MOST_SIGNS = 400
"""Of a formula: Python's parser gives up on deep ones with errors of its own."""
_Function = Callable[[Any, Any], Any]


class Formula:
    """A formula of numbers, ``NAMES``, ``+ - * / **``, ``max`` and ``min``; other texts are a ValueError."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MOST_SIGNS:
            raise ValueError(f"a formula of {len(text):,} signs is longer than {MOST_SIGNS}; shorten it")
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{text!r} is no formula ({error.msg})") from error
        _check(self._body, text)

    def __call__(self, values: Mapping[str, Any], largest: _Function = max, smallest: _Function = min) -> Any:
        """Return the value for these names.

        largest, smallest: of two values; other ones than Python's own for arrays.
        """
        return _value(self._body, values, {"max": largest, "min": smallest})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _check(node: ast.expr, text: str) -> None:
    """Raise ValueError for what a formula cannot have."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        children: list[ast.expr] = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        children = [node.operand]
    elif isinstance(node, ast.Call) and _is_function(node):
        children = node.args
    elif (isinstance(node, ast.Name) and node.id in NAMES) or _is_number(node):
        children = []
    else:
        raise ValueError(
            f"{text!r}: a formula cannot have {ast.unparse(node)!r}; it has numbers, + - * / **, max, min and "
            f"{', '.join(NAMES)}"
        )
    for child in children:
        _check(child, text)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _is_function(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and len(node.args) > 0 and not node.keywords


def _value(node: ast.expr, values: Mapping[str, Any], functions: Mapping[str, _Function]) -> Any:
    if isinstance(node, ast.BinOp):
        left, right = (_value(each, values, functions) for each in (node.left, node.right))
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, values, functions)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name), node
        return reduce(functions[node.func.id], (_value(each, values, functions) for each in node.args))
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.Constant), node
    return float(node.value)  # type: ignore[arg-type]
