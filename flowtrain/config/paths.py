"""Paths in a configuration: where relative ones start from, and which must exist.

A relative path is searched in the current directory, then in the configuration file's directory, then in that
directory's parent (so that ``configs/a.yaml`` may name the project's files from anywhere), and made absolute. A pattern
is looked for in the same way: in the first of them that has a match. URLs stay as written, and so does a model or
tokenizer that is not found, if it looks like a hub id (``name`` or ``owner/name``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from glob import has_magic, iglob
from pathlib import Path as FilePath
from typing import Any

from flowtrain.config.messages import Document, fault_line, show_value
from flowtrain.config.schema import ANY
from flowtrain.config.yaml_text import Path, dotted
from flowtrain.errors import Fault, FaultCode

_FILES = (
    ("data", "sources", ANY, "path"),
    ("data", "sources", ANY, "image_root"),
    ("data", "eval", "path"),
    ("data", "eval", "image_root"),
    ("data", "eval", ANY, "path"),
    ("data", "eval", ANY, "image_root"),
    ("model", "chat_template"),
    ("scheduler", "cost_profile"),
    ("emulated", "profile"),
)
_MODELS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("encoders", ANY, "path"),
    ("backbone", "path"),
)
_WRITTEN_LATER: tuple[tuple[str, ...], ...] = (("allocator", "profile"), ("data", "grouping", "sizes"))
"""Files that need not exist yet: ``flowtrain profile`` and ``flowtrain data check`` read the configuration and write
them."""
_DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".tar")
_MAX_PATH_SHOWN = 300
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def resolve_paths(values: dict[str, Any], document: Document, config_dir: FilePath, check: bool) -> list[Fault]:
    """Make the paths in ``values`` absolute, in place; returns a fault for each that does not exist (if ``check``)."""
    faults: list[Fault] = []
    if check and (problem := _unusable(values["runs_dir"])) is not None:
        text = f"runs_dir = {values['runs_dir']!r}: {problem}"
        faults.append(Fault("runs_dir", FaultCode.VALUE, fault_line(document, ("runs_dir",), text)))
    for holder, path in (found for pattern in _WRITTEN_LATER for found in _holders(values, pattern, ())):
        fault = _resolve(holder, path, config_dir, may_be_hub_id=False)
        if fault and check and _unusable(holder[str(path[-1])]):
            faults.append(Fault(dotted(path), FaultCode.VALUE, fault_line(document, path, fault)))
        elif fault:
            name = str(path[-1])
            holder[name] = os.path.abspath(os.path.expanduser(holder[name]))
    for patterns, may_be_hub_id in ((_FILES, False), (_MODELS, True)):
        for pattern in patterns:
            for holder, path in _holders(values, pattern, ()):
                fault = _resolve(holder, path, config_dir, may_be_hub_id)
                if fault and check:
                    faults.append(Fault(dotted(path), FaultCode.VALUE, fault_line(document, path, fault)))
    return faults


def data_fault(text: str, label: str, config_dir: FilePath) -> str | None:
    """Say why a path of data cannot be used, after ``label``; None if it can."""
    return _resolve({"path": text}, ("data", "sources", 0, "path"), config_dir, may_be_hub_id=False, label=label)


def _resolve(
    holder: dict[str, Any], path: Path, config_dir: FilePath, may_be_hub_id: bool, label: str | None = None
) -> str | None:
    name, label = str(path[-1]), label or f"{dotted(path)} ="
    text = holder[name]
    if name == "chat_template" and "{" in text:
        return None  # the template itself, not the name of a file
    if "://" in text:
        return None
    if (problem := _unusable(text)) is not None:
        return f"{label} {show_value(text)}: {problem}"
    written = FilePath(text).expanduser()
    bases = [] if written.is_absolute() else [FilePath.cwd(), config_dir, config_dir.parent]
    for candidate in [base / written for base in bases] or [written]:
        if os.path.exists(candidate):  # Path.exists raises for a name that is too long
            if name == "image_root" and not os.path.isdir(candidate):
                return f"{label} {text!r}: must be a directory"
            holder[name] = str(candidate.resolve())
            return None
    is_pattern = path[0] == "data" and name == "path" and has_magic(text)
    if is_pattern:
        for candidate in [base / written for base in bases] or [written]:
            if next(iglob(str(candidate), recursive=True), None) is not None:
                holder[name] = os.path.abspath(candidate)
                return None
    if may_be_hub_id and _HUB_ID.fullmatch(text):
        return None
    where = f" (looked in {', '.join(dict.fromkeys(str(base) for base in bases))})" if bases else ""
    hub = "; it is not a hub id (owner/name) either" if may_be_hub_id else ""
    if path[0] == "data" and name == "path" and looks_like_hub_data(text):
        hub = f"; for the hub's data set of this name, write hf://datasets/{text}"
    missing = "no file matches" if is_pattern else "no such file or directory"
    shown = repr(text) if len(text) <= _MAX_PATH_SHOWN else show_value(text)
    return f"{label} {shown}: {missing}{where}{hub}"


def _unusable(text: str) -> str | None:
    """Say why no file can have this path: a NUL in it, or a home directory of nobody."""
    if "\0" in text:
        return "no path has a NUL in it; take it out"
    if not text.startswith("~") or not os.path.expanduser(text).startswith("~"):
        return None
    return f"{text.split('/')[0]} is no user's home directory here; write the path in full"


def looks_like_hub_data(text: str) -> bool:
    """Whether a path may be meant as the id of a data set on the hub (``owner/name``)."""
    return text.count("/") == 1 and _HUB_ID.fullmatch(text) is not None and not text.endswith(_DATA_ENDINGS)


def _holders(value: Any, pattern: tuple[str, ...], walked: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Mappings in ``value`` in which the last name of the pattern is set, with the whole path of that key.

    A key that is not there is passed over: ``data.eval`` has one of two forms.
    """
    if len(pattern) == 1:
        if isinstance(value, dict) and value.get(pattern[0]) is not None:
            yield value, (*walked, pattern[0])
        return
    if not isinstance(value, dict | list):
        return
    keys: Any = [pattern[0]]
    if pattern[0] == ANY:
        keys = range(len(value)) if isinstance(value, list) else list(value)
    for key in keys:
        yield from _holders(value[key], pattern[1:], (*walked, key))
