"""How another process asks a run for a trace: through files of the run's directory, which only its owner can open."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError, FlowTrainError, RunFileError
from flowtrain.observability.files import replace_text
from flowtrain.observability.run_dir import RunDir

logger = logging.getLogger(__name__)

MAX_STEPS = 100_000
POLL_S = 0.2
_REQUEST, _ANSWER = ".trace-request.json", ".trace-answer.json"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Steps to trace from now on."""

    id: str
    """Chosen by the one who asks; the answer has it too."""
    steps: int
    profiler: bool = False
    memory: bool = False


class TraceState(StrEnum):
    """How far a request is."""

    RECORDING = "recording"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TraceAnswer:
    """What became of a request."""

    id: str
    state: TraceState
    directory: str | None = None
    """Where the files are; None: nothing was recorded."""
    first_step: int = 0
    last_step: int = 0
    """The last step that is in it, or will be; before ``first_step`` if the run ended before one was done."""
    reason: str | None = None
    """Why it was refused, or ended early."""


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """A trace that was asked for while the run trained."""

    directory: Path
    first_step: int
    """The first whole step; what happened before it, from the request on, is there too."""
    last_step: int
    files: tuple[Path, ...]
    """``trace.json``, then what the profiler and the allocator wrote, by name."""
    note: str | None = None
    """Why it ended early or lacks something."""


# --- the one who asks -----------------------------------------------------------------------------------------------


def request_trace(
    run: RunDir,
    steps: int,
    profiler: bool = False,
    memory: bool = False,
    progress: Callable[[TraceAnswer], None] = lambda answer: None,
) -> TraceWindow:
    """Ask a run that trains, here or on another machine, for a trace of its next steps, and wait for it.

    progress: called when recording begins. Raises ConfigError if nothing trains there, no step is left or another trace
    is under way, FlowTrainError if the run ends before a step is traced. An interrupt leaves a trace that
    has begun to the run.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps ({steps}) must be between 1 and {MAX_STEPS}")
    if not run.is_held():
        raise ConfigError(f"{run.root}: no process trains this run now; start it, or resume it, and ask again")
    if (run.root / _REQUEST).exists():
        raise ConfigError(f"{run.root}: the run has not yet taken another request ({_REQUEST}); wait for it")
    request = TraceRequest(secrets.token_hex(8), steps, profiler, memory)
    replace_text(run.root / _REQUEST, json.dumps(asdict(request)))
    try:
        return _window(run, request, _wait(run, request, progress))
    finally:
        _withdraw(run, request)


def _wait(run: RunDir, request: TraceRequest, progress: Callable[[TraceAnswer], None]) -> TraceAnswer:
    shown = False
    while True:
        is_held = run.is_held()  # before the answer is read: a run that ends answers first
        answer = read_answer(run)
        if answer is not None and answer.id == request.id:
            if answer.state is TraceState.REFUSED:
                raise ConfigError(f"{run.root}: {answer.reason}")
            if answer.state is TraceState.DONE:
                return answer
            if not shown:
                progress(answer)
                shown = True
        if not is_held:
            where = f"; what it recorded is in {answer.directory}" if shown and answer is not None else ""
            raise FlowTrainError(f"{run.root}: the run ended, or was killed, before the trace was complete{where}")
        time.sleep(POLL_S)


def _window(run: RunDir, request: TraceRequest, answer: TraceAnswer) -> TraceWindow:
    if answer.directory is None or answer.last_step < answer.first_step:
        where = f"; what was recorded until then is in {answer.directory}" if answer.directory is not None else ""
        raise FlowTrainError(f"{run.root}: no step was left to trace: {answer.reason}{where}")
    directory = run.root / answer.directory
    others = sorted(path for path in directory.iterdir() if path.name != "trace.json")
    notes = [answer.reason] if answer.reason else []
    for kind, is_asked in (("profiler", request.profiler), ("memory", request.memory)):
        if is_asked and not any(path.name.startswith(f"{kind}-") for path in others):
            notes.append(f"no actor has written a {kind} file yet; the logs of the actors say why")
    files = [path for path in (directory / "trace.json", *others) if path.is_file()]
    return TraceWindow(directory, answer.first_step, answer.last_step, tuple(files), "; ".join(notes) or None)


def _withdraw(run: RunDir, request: TraceRequest) -> None:
    """Take back a request that the run has not seen."""
    pending = _read(run.root / _REQUEST)
    if pending is not None and pending.get("id") == request.id:
        with suppress(OSError):
            (run.root / _REQUEST).unlink()


def read_answer(run: RunDir) -> TraceAnswer | None:
    """What became of the last request; None without one."""
    record = _read(run.root / _ANSWER)
    if record is None:
        return None
    try:
        return TraceAnswer(**record | {"state": TraceState(record["state"])})
    except (KeyError, TypeError, ValueError):
        return None


# --- the run --------------------------------------------------------------------------------------------------------


def take_request(run: RunDir) -> TraceRequest | None:
    """Take a request out of the run's directory; None without one, and for a file that is none."""
    path = run.root / _REQUEST
    try:
        text = path.read_bytes()
        path.unlink()
    except OSError:  # mostly that there is none
        return None
    request: TraceRequest | None = None
    with suppress(TypeError, ValueError):
        request = TraceRequest(**json.loads(text))
    if request is None or type(request.steps) is not int or not 1 <= request.steps <= MAX_STEPS:
        logger.warning("%s was no request for a trace, and is removed", path)
        return None
    return request


def answer_request(run: RunDir, answer: TraceAnswer) -> None:
    """Let the one who asked know. Raises RunFileError if the disk refuses it."""
    try:
        replace_text(run.root / _ANSWER, json.dumps(asdict(answer)))
    except OSError as error:
        raise RunFileError(f"{run.root / _ANSWER} cannot be written: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
