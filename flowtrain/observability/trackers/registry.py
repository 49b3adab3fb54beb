"""Makes the trackers that a configuration names, and those of callbacks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flowtrain.config.flow import ObservabilityConfig
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.observability.tracker import Tracker

_PACKAGE = "flowtrain.observability.trackers"
_NAMED: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", f"{_PACKAGE}.tensorboard:TensorBoardTracker"),
    "wandb": ("wandb", f"{_PACKAGE}.wandb:WandbTracker"),
    "mlflow": ("mlflow", f"{_PACKAGE}.mlflow:MlflowTracker"),
}
"""The library that each needs, and its class."""


def check_trackers(settings: ObservabilityConfig) -> None:
    """Raise ConfigError if a tracker's library or module is not installed here; imports none of them."""
    for name in settings.trackers:
        if name in _NAMED:
            library, way_out = _NAMED[name][0], f"pip install 'flowtrain[{name}]'"
        else:
            library, way_out = name.partition(":")[0], "put its directory on PYTHONPATH"
        if not _is_there(library):
            raise ConfigError.of(
                "observability.trackers",
                FaultCode.VALUE,
                f"observability.trackers names {name}, but Python finds no module {library} here; {way_out}, or take "
                f"{name} out",
            )


def make_trackers(settings: ObservabilityConfig, callbacks: Sequence[object] = ()) -> list[Tracker]:
    """Start the trackers of a configuration, then those of callbacks."""
    named = [Tracker(name, partial(_build, name, settings.tracker_options.get(name, {}))) for name in settings.trackers]
    return named + [Tracker(type(callback).__name__, _giving(callback)) for callback in callbacks]


def _build(name: str, options: Mapping[str, Any]) -> object:
    module, _, attribute = (_NAMED[name][1] if name in _NAMED else name).partition(":")
    return getattr(importlib.import_module(module), attribute)(**options)


def _giving(callback: object) -> Callable[[], object]:
    return lambda: callback


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
