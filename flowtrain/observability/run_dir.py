"""``runs/<name>/``: the files of a run, and the checks whether a directory may be used."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.config.home import expanded
from flowtrain.config.load import dump_resolved, load_resolved
from flowtrain.config.resume import check_resumable
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import dump_yaml
from flowtrain.errors import ConfigError
from flowtrain.observability.files import PRIVATE_DIRECTORY, open_private, replace_text

logger = logging.getLogger(__name__)

MAX_NAMED = 12
"""Runs that a message names."""
_LOCK = ".lock"
_LOCK_ATTEMPTS, _LOCK_RETRY_S = 5, 0.02


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run; ``root`` is its directory, an absolute path."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def resume_command(self) -> str:
        """What goes on with the run as it was last started: the configuration has all overrides."""
        return f"flowtrain train {self.config} --resume"

    @property
    def plan(self) -> Path:
        """The actors of the run and their resources."""
        return self.root / "plan.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object for each thing that the run told, steps excepted."""
        return self.root / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """The outcome of every position."""
        return self.root / "ledger.parquet"

    @property
    def quarantine(self) -> Path:
        """Rejected samples with their reasons."""
        return self.root / "quarantine.jsonl"

    @property
    def skipped(self) -> Path:
        """The samples of steps that made no update."""
        return self.root / "skipped_samples.jsonl"

    @property
    def trace(self) -> Path:
        """Spans of all actors over the first steps, for Perfetto or Chrome."""
        return self.root / "trace.json"

    @property
    def windows(self) -> Path:
        """Traces of steps that were asked for while the run trained, one directory each."""
        return self.root / "traces"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.root / "report.html"

    @property
    def profile(self) -> Path:
        """What the run measured of its device, for ``scheduler.cost_profile`` of later runs."""
        return self.root / "profile.json"

    @property
    def stacks(self) -> Path:
        """What the threads of all ranks were in when one hung; a directory for each step."""
        return self.root / "stacks"

    @property
    def generated(self) -> Path:
        """What the model answered to held-out samples, with their pictures; a directory for each step."""
        return self.root / "generated"

    @property
    def checkpoints(self) -> Path:
        """Resumable checkpoints."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.root / "export"

    def is_held(self) -> bool:
        """Whether a process trains in the directory (``held_run_dir``); False on a file system without locks."""
        try:
            descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # there is no lock file: no process has held the directory
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write ``plan.yaml``."""
        replace_text(self.plan, dump_yaml(plan))

    def load_config(self) -> RunConfig:
        """The configuration that the run was last started with; raises ConfigError if there is none."""
        if not self.config.is_file():
            raise ConfigError(f"{self.root}: not a run's directory (it has no {self.config.name})")
        return load_resolved(self.config)


def run_dir(config: RunConfig) -> RunDir:
    """The run's directory; nothing is created."""
    return RunDir(expanded(config.runs_dir).absolute() / config.name)


def find_run(run: str | os.PathLike[str]) -> Path:
    """Return the directory of a run, given by its path or by its name under ``./runs``; raises ConfigError."""
    candidates = [expanded(run), Path("runs") / run]
    for candidate in candidates:
        if any(os.path.isfile(candidate / name) for name in ("config.yaml", "metrics.jsonl")):
            return candidate
    looked = " or ".join(dict.fromkeys(str(candidate / "config.yaml") for candidate in candidates))
    known = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    others = f"; ./runs has {', '.join(known[-MAX_NAMED:])}" if known else ""
    raise ConfigError(
        f"no run {str(run)!r}: there is no {looked}{others}. Give the run's directory; one that starts has none until "
        "Ray has placed its actors"
    )


@contextmanager
def held_run_dir(config: RunConfig) -> Iterator[None]:
    """Lock the run's directory for this process, creating it if necessary; the system unlocks it when the process ends.

    Raises ConfigError while another process trains there: truncating files for a resume would damage its run.
    """
    root = run_dir(config).root
    root.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    # Opened for writing, because NFS locks only such files. It is never removed: that would race with the next process.
    descriptor = open_private(root / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _lock(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{root}: another process is training this run; wait for its end or stop it, or give this run another name "
            f"(name={config.name}-2)"
        ) from error
    except OSError as error:
        logger.warning(
            "%s: this file system has no locks (%s); make sure that only one process trains there", root, error
        )
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a run's directory; raises BlockingIOError. Tries a few times: ``is_held`` takes the lock for an instant."""
    for _ in range(_LOCK_ATTEMPTS - 1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_run_dir(config: RunConfig, resume: bool) -> RunDir:
    """Create or reopen the run's directory, private to its owner, and write ``config.yaml`` into it.

    With ``resume``, an existing run must be resumable with this configuration; if there is none, the run starts from
    the beginning. Otherwise raises ConfigError, before anything is written.
    """
    check_run_dir(config, resume)  # again: another process may have started or ended a run there in the meantime
    run = run_dir(config)
    run.root.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    run.checkpoints.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    replace_text(run.config, dump_resolved(config))
    return run


def check_run_dir(config: RunConfig, resume: bool) -> None:
    """Raise ConfigError unless ``open_run_dir`` would succeed; writes nothing."""
    run = run_dir(config)
    if os.path.exists(run.root) and not run.root.is_dir():
        raise ConfigError(f"{run.root} is a file; the run's directory goes there, so move the file away or change name")
    # Path.exists raises below a directory without search permission; os.path.exists does not.
    there = next(path for path in (run.root, *run.root.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"runs_dir ({config.runs_dir}): no directory can be created in {there}; choose another place")
    if not run.root.is_dir() or all(path.name == _LOCK for path in run.root.iterdir()):
        return
    if not resume:
        raise ConfigError(
            f"{run.root} already holds a run; continue it with --resume, give this run another name "
            f"(name={config.name}-2), or remove the directory"
        )
    if run.config.is_file():
        check_resumable(run.load_config(), config)
