"""Checks of the sections that go to classes of Hugging Face (``encoders.*.config``, ``.image_processor``,
``backbone.config``), as far as they need no library: kinds of values, and sizes that no machine could hold.

What a class itself refuses is found when it reads the section (``models/weights.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flowtrain.config.base import MAX_INT
from flowtrain.errors import Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig

MOST = {
    "num_hidden_layers": 4096,
    "depth": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "num_channels": 1 << 10,
    "in_channels": 1 << 10,
    "temporal_patch_size": 1 << 10,
    "spatial_merge_size": 1 << 10,
    "num_position_embeddings": 1 << 26,
    "num_register_tokens": 1 << 16,
}
"""The largest value of each size of a module; at least 1. No model comes near; larger ones would take for ever."""
SIDES = {"image_size": 1 << 16, "patch_size": 1 << 16, "size": 1 << 16, "crop_size": 1 << 16}
"""The same of sides in pixels: one number, two, or a mapping with them."""
MAX_PARAMETERS = 10**14
"""Of one module."""


def module_values_are_possible(config: RunConfig) -> Iterator[Fault]:
    """Check the sections of all modules."""
    sections: dict[str, Mapping[str, Any] | None] = {}
    for name, encoder in config.encoders.items():
        sections[f"encoders.{name}.config"] = encoder.config
        sections[f"encoders.{name}.image_processor"] = encoder.image_processor
    sections["backbone.config"] = config.backbone.config
    for key, values in sections.items():
        if values is not None:
            yield from _faults(key, values)


def _faults(key: str, values: Mapping[str, Any]) -> Iterator[Fault]:
    for path, number in _numbers(values, key):
        if isinstance(number, float) and not math.isfinite(number):
            yield _fault(path, number, "must be a finite number")
        elif abs(number) > MAX_INT:
            yield _fault(path, number, f"must be at most {MAX_INT}")
    model_type = values.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        yield _fault(f"{key}.model_type", model_type, "must be text, such as qwen3 or siglip_vision_model")
    wrong = False
    for name, most in MOST.items():
        value = values.get(name)
        if value is not None and not _is_size(value, most):
            wrong = True
            yield _fault(f"{key}.{name}", value, f"must be an integer from 1 to {most}")
    for name, most in SIDES.items():
        value = values.get(name)
        if value is not None and not _are_sides(value, most):
            wrong = True
            yield _fault(f"{key}.{name}", value, f"must be pixels from 1 to {most}: a number, or two")
    if not wrong and (count := _least_parameters(values)) > MAX_PARAMETERS:
        text = (
            f"{key}: its sizes (num_hidden_layers, hidden_size, intermediate_size, vocab_size) make {count:.1e} "
            f"parameters or more; a module can have {MAX_PARAMETERS:.0e}: lower them"
        )
        yield Fault(key, FaultCode.VALUE, text)


def _least_parameters(values: Mapping[str, Any]) -> int:
    """Parameters of a module's matrices, at least; unknown sizes count as 1."""
    width = values.get("hidden_size") or 1
    layers = values.get("num_hidden_layers") or values.get("depth") or 1
    inner = values.get("intermediate_size") or 1
    return int(layers * width * (2 * width + 2 * inner) + width * (values.get("vocab_size") or 1))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _are_sides(value: Any, most: int) -> bool:
    if not isinstance(value, Mapping):
        sides = value if isinstance(value, list | tuple) else [value]
        return bool(sides) and all(_is_size(each, most) for each in sides)
    # Processors of natural resolution have areas under these names.
    limits = {name: most * most if str(name).endswith("_edge") else most for name in value}
    return bool(value) and all(each is None or _is_size(each, limits[name]) for name, each in value.items())


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _fault(key: str, value: Any, wanted: str) -> Fault:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return Fault(key, FaultCode.VALUE, f"{key} = {shown}: {wanted}")
