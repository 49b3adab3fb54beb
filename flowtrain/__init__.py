"""FlowTrain: vision-language models trained as producer and consumer."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_FUNCTIONS = (
    "calibrate",
    "data_check",
    "data_show",
    "doctor",
    "dry_run",
    "export",
    "init",
    "pack",
    "plan",
    "profile",
    "report",
    "simulate",
    "status",
    "trace",
    "train",
)
_PLACES = {"Callback": "flowtrain.observability.callback", **dict.fromkeys(_FUNCTIONS, "flowtrain.api")}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    """Import ``train``, ``plan`` and the like when they are first used, so that ``import flowtrain`` stays light."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what a user may take from here, whether it is imported yet or not."""
    return sorted(__all__)
