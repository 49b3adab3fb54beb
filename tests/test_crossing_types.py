"""What crosses a process is defined in ``flowtrain.types``: looked up in the signatures of everything Ray spawns."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest

import flowtrain
from flowtrain.actors.keeper import Keeper
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.base import ConfigModel
from flowtrain.types.memory import Extent

ROOT = Path(flowtrain.__file__).parent
PLAIN = {int, float, bool, str, bytes, NoneType}
CONTAINERS = {tuple, list, dict, set, frozenset, Sequence, Mapping, AbstractSet, Union, UnionType}

_PASSED_ON = "of an actor's own class, whose signatures are checked; its host passes it on"
EXEMPT: dict[type | str, str] = {
    CoordinatorLink: "a handle to the coordinator, no message",
    Keeper: "a handle to the keeper of snapshots, no message",
    "Coordinator.__init__.make_flow": "called once inside the coordinator's process, so that the driver builds no flow",
    "Coordinator.__init__.remake_flow": "as make_flow",
    "EmulatedHost.add.actor_class": _PASSED_ON,
    "EmulatedHost.add.args": _PASSED_ON,
    "EmulatedHost.call.args": _PASSED_ON,
    "EmulatedHost.call.return": _PASSED_ON,
}
"""What crosses without being of ``flowtrain.types``, and why: a class, or a parameter that is a function."""

IN_PROCESS = {
    "BackboneRank.make_trainer": "a test or an emulation puts its own trainer in",
    "Encoder.encode": "a test or an emulation computes something else",
    "EncoderRank.forward": "a test fails inside it",
}
"""Public methods that only the actor itself calls, and why they are public."""


# --- what is spawned --------------------------------------------------------------------------------------------


def spawned_names(source: str) -> Iterator[str]:
    """Names given to ``ray.remote``; any other use of it is an error, since this test could not follow it."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            assert "remote" not in {alias.name for alias in node.names}, "write ray.remote(...), which is looked for"
        if not (isinstance(node, ast.Attribute) and node.attr == "remote" and ast.unparse(node.value) == "ray"):
            continue
        call = parents[node]
        is_call = isinstance(call, ast.Call) and call.func is node and len(call.args) == 1 and not call.keywords
        assert is_call and isinstance(call.args[0], ast.Name), f"line {node.lineno}: write ray.remote(Name)"
        yield call.args[0].id


def resolved(module: ModuleType, name: str) -> list[Any]:
    """What a name stands for; a parameter stands for the classes that the module's dataclasses have as defaults."""
    if hasattr(module, name):
        return [getattr(module, name)]
    holders = [each for each in vars(module).values() if is_dataclass(each) and each.__module__ == module.__name__]
    return [field.default for holder in holders for field in fields(holder) if isinstance(field.default, type)]


@cache
def all_spawned() -> list[Any]:
    found: dict[Any, None] = {}
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name in spawned_names(source) if "remote" in source else ():
            module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            targets = resolved(importlib.import_module(module), name)
            assert targets, f"{path}: nothing is known of ray.remote({name})"
            found.update(dict.fromkeys(targets))
    return list(found)


# --- what crosses -----------------------------------------------------------------------------------------------


def signatures(target: Any) -> Iterator[tuple[str, Any]]:
    """(where, annotation) of all that a spawned class or function takes and returns."""
    functions = {target.__qualname__: target}
    if isinstance(target, type):
        members = inspect.getmembers(target, inspect.isfunction)
        functions = {f"{target.__qualname__}.{name}": each for name, each in members}
    for where, function in functions.items():
        name = where.rpartition(".")[2]
        if where in IN_PROCESS or (name.startswith("_") and name != "__init__"):
            continue
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters)[isinstance(target, type) :]
        for parameter in [*parameters, *(() if name == "__init__" else ("return",))]:
            if parameter != "_ray_trace_ctx":  # Ray adds it to a class that was spawned in this process
                yield f"{where}.{parameter}", hints.get(parameter, Any)


def strays(where: str, annotation: Any) -> list[str]:
    """Faults of an annotation: what in it is neither plain, nor of ``flowtrain.types``, nor configuration."""
    if where in EXEMPT or annotation in EXEMPT or annotation in PLAIN:
        return []
    origin, items = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return []
    if origin is np.ndarray:
        return [] if is_number(*get_args(items[1])) else [f"{where}: {annotation}"]
    if origin in CONTAINERS:
        return [fault for item in items if item is not Ellipsis for fault in strays(where, item)]
    if isinstance(annotation, type) and annotation.__module__.startswith("flowtrain."):
        if issubclass(annotation, ConfigModel) and annotation.__module__.startswith("flowtrain.config."):
            return []
        if annotation.__module__.startswith("flowtrain.types."):
            if issubclass(annotation, Enum):
                return []
            if is_dataclass(annotation) and annotation.__dataclass_params__.frozen:
                hints = get_type_hints(annotation)
                return [fault for name, hint in hints.items() for fault in strays(f"{where}.{name}", hint)]
    return [f"{where}: {annotation}"]


def is_number(element: Any) -> bool:
    """Whether an array's element is a number of a certain width; objects could be anything."""
    return isinstance(element, type) and issubclass(element, np.number) and not element.__subclasses__()


def test_everything_that_is_spawned_is_found() -> None:
    names = {target.__name__ for target in all_spawned()}
    assert {"Coordinator", "Feeder", "Encoder", "BackboneRank", "Profiler", "Echo", "NodeProbe"} <= names


@pytest.mark.parametrize("target", all_spawned(), ids=lambda target: target.__name__)
def test_only_types_configuration_and_plain_values_cross(target: Any) -> None:
    assert [fault for where, annotation in signatures(target) for fault in strays(where, annotation)] == []


def test_exempt_is_only_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [pair for target in all_spawned() for pair in signatures(target)]
    for key in list(EXEMPT):
        monkeypatch.delitem(EXEMPT, key)
        assert [fault for where, annotation in found for fault in strays(where, annotation)], f"{key} needs it no more"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py"))
    methods = {f"{each.__name__}.{name}" for each in all_spawned() for name in vars(each)}
    assert set(IN_PROCESS) <= methods
    assert [name for name in IN_PROCESS if f".{name.partition('.')[2]}.remote(" in sources] == []


# --- the check itself -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A message outside ``flowtrain.types``."""

    number: int


class WrongKind(Enum):
    ONE = 1


class Changeable:
    number: int


class Actor:
    def __init__(self, kind: WrongKind) -> None: ...

    def right(self, extent: Extent | None, rows: tuple[dict[str, list[float]], ...]) -> Literal["a"]: ...  # type: ignore[empty-body]

    async def returns(self) -> tuple[int, dict[str, Wrong | None]]: ...  # type: ignore[empty-body]

    def takes(self, rows: Sequence[Changeable], untyped, anything: dict[str, Any]) -> None: ...  # type: ignore[no-untyped-def]

    def calls(self, build: Callable[[], Extent]) -> None: ...

    def _private(self, wrong: Wrong) -> None: ...


def test_a_wrong_class_is_found_wherever_it_hides() -> None:
    found = [fault.partition(":")[0] for where, each in signatures(Actor) for fault in strays(where, each)]
    assert sorted(found) == [
        "Actor.__init__.kind",
        "Actor.calls.build",
        "Actor.returns.return",
        "Actor.takes.anything",
        "Actor.takes.rows",
        "Actor.takes.untyped",
    ]


def test_a_wrong_field_of_a_right_class_is_found() -> None:
    message = make_dataclass("Message", [("count", int), ("wrong", tuple[Wrong, ...])], frozen=True)
    message.__module__ = "flowtrain.types.messages"
    assert len(strays("Actor.run.return", message)) == 1
    arrays = make_dataclass("Arrays", [("rows", npt.NDArray[np.int64]), ("each", npt.NDArray[np.object_])], frozen=True)
    arrays.__module__ = "flowtrain.types.messages"
    assert [fault.partition(":")[0] for fault in strays("Actor.run", arrays)] == ["Actor.run.each"]
    assert strays("Actor.run", npt.NDArray[np.number[Any]]), "of no certain width"
    loose = make_dataclass("Loose", [("count", int)])
    loose.__module__ = "flowtrain.types.messages"
    assert strays("Actor.run.return", loose), "it is not frozen"


@pytest.mark.parametrize(
    "source",
    ["@ray.remote\nclass A: ...", "ray.remote(num_cpus=0)(A)", "from ray import remote"],
)
def test_a_spawn_that_cannot_be_followed_is_refused(source: str) -> None:
    with pytest.raises(AssertionError, match=r"write ray\.remote\("):
        list(spawned_names(source))
