"""Makes the trackers that a configuration names, and those of callbacks."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, cast

from flowtrain.config.flow import ObservabilityConfig
from flowtrain.config.messages import refusal
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, Fault, FaultCode
from flowtrain.observability.callback import method_fault
from flowtrain.observability.tracker import Tracker, described

_PACKAGE = "flowtrain.observability.trackers"
_NAMED: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", f"{_PACKAGE}.tensorboard:TensorBoardTracker"),
    "wandb": ("wandb", f"{_PACKAGE}.wandb:WandbTracker"),
    "mlflow": ("mlflow", f"{_PACKAGE}.mlflow:MlflowTracker"),
}
"""The library that each needs, and its class."""
_MAX_SHOWN = 10
"""Names that a message lists; a module may have thousands."""
_ABSENT = object()
_Parameter = inspect.Parameter


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


def check_tracker_classes(config: RunConfig) -> None:
    """Raise ConfigError, with all faults, if a tracker's class is not there, is no callback or lacks an option.

    This runs a user's module, so only ``train`` and its dry run may call it.
    """
    settings = config.observability
    check_trackers(settings)
    faults: list[Fault] = []
    for index, name in enumerate(settings.trackers):
        key = f"observability.trackers.{index}"
        try:
            found = _class_of(name)
        except _NoTracker as error:
            faults.append(Fault(key, FaultCode.VALUE, f"{key} = {name!r}: {error}"))
        else:
            faults += _option_faults(name, found, settings.tracker_options.get(name, {}))
    if faults:
        raise refusal(f"run {config.name!r}", faults)


def make_trackers(settings: ObservabilityConfig, callbacks: Sequence[object] = ()) -> list[Tracker]:
    """Start the trackers of a configuration, then those of callbacks."""
    named = [Tracker(name, partial(_build, name, settings.tracker_options.get(name, {}))) for name in settings.trackers]
    return named + [Tracker(type(callback).__name__, _giving(callback)) for callback in callbacks]


def _build(name: str, options: Mapping[str, Any]) -> object:
    module, attribute = _place(name)
    built: object = getattr(importlib.import_module(module), attribute)(**options)
    if (fault := method_fault(built)) is not None:  # the class alone does not always show it
        raise ConfigError(f"the object that {attribute} gives {fault}")
    return built


def _place(name: str) -> tuple[str, str]:
    """The module and the class of a tracker."""
    module, _, attribute = (_NAMED[name][1] if name in _NAMED else name).partition(":")
    return module, attribute


class _NoTracker(Exception):
    """Says why a name gives no class of trackers."""


def _class_of(name: str) -> Callable[..., object]:
    """The class of a tracker, or a ``functools.partial`` of one."""
    module, attribute = _place(name)
    try:
        found = importlib.import_module(module)
        named = getattr(found, attribute, _ABSENT)
        classes = _class_names(found) if named is _ABSENT else []
    except (Exception, SystemExit) as error:  # the user's code, such as a module's ``__getattr__``, may raise anything
        raise _NoTracker(f"the import of {module} fails; correct it: {described(error)}") from error
    if named is _ABSENT:
        raise _NoTracker(f"module {module} has no {attribute}; {_meant(attribute, classes, f'{module}:')}")
    cls = named.func if isinstance(named, partial) else named
    if not isinstance(cls, type):
        raise _NoTracker(f"{attribute} is no class but a {type(named).__name__}; name a class such as my_boards:Board")
    if (fault := method_fault(cls)) is not None:
        raise _NoTracker(f"the class {fault}")
    return cast("Callable[..., object]", named)


def _class_names(module: ModuleType) -> list[str]:
    """Names of a module's classes, and of what it would import only when asked; imports none of that."""
    loaded = vars(module)
    return [name for name in dir(module) if isinstance(loaded.get(name, object), type)]


def _option_faults(name: str, tracker: Callable[..., object], options: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with the names of a tracker's options; values, which may be secret, are not shown."""
    try:
        signature = inspect.signature(tracker)
    except (TypeError, ValueError):  # a class of C, which tells nothing
        return
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    by_name = [
        each for each, kind in kinds.items() if kind in (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
    ]
    key = f"observability.tracker_options.{name}"
    unknown = [] if _Parameter.VAR_KEYWORD in kinds.values() else [each for each in options if each not in by_name]
    for option in unknown:
        text = f"{key}.{option}: unknown option; {_meant(option, by_name)}"
        yield Fault(f"{key}.{option}", FaultCode.KEY, text)
    try:
        signature.bind(**{option: value for option, value in options.items() if option not in unknown})
    except TypeError as error:
        yield Fault(key, FaultCode.KEY, f"{key}: {name} cannot be called with these options: {error}; add it there")


def _meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The way out of a wrong name."""
    public = [each for each in known if not each.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"it has {', '.join(public[:_MAX_SHOWN]) or 'none'}"


def _giving(callback: object) -> Callable[[], object]:
    return lambda: callback


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return True
    first, *rest = module.split(".")
    try:
        spec, name = importlib.util.find_spec(first), first
    except (ImportError, ValueError):  # ``__main__`` and the like say nothing of where they come from
        return False
    for part in rest:  # ``importlib.util.find_spec`` would import the packages above it
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None
