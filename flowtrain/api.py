"""FlowTrain from Python: ``flowtrain.train``, ``plan``, ``pack`` and ``doctor``. The command line only wraps these."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.config.load import load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import check_run_dir

if TYPE_CHECKING:
    from flowtrain.controller.doctor import DoctorReport
    from flowtrain.controller.pack import PackReport, Progress
    from flowtrain.controller.prepare import Prepared
    from flowtrain.controller.run import RunSummary

ConfigLike = RunConfig | str | PathLike[str]


def train(config: ConfigLike, overrides: Sequence[str] = (), resume: bool = False) -> RunSummary:
    """Train; returns what came of it.

    config: a configuration, or the path of a YAML file. overrides: ``section.key=value``, applied in order. resume: go
    on from the last complete checkpoint. Raises ConfigError before anything starts, other FlowTrainErrors later.
    """
    resolved = resolve(config, overrides)
    check_run_dir(resolved, resume)
    # Ray and torch are imported only once the configuration is known to be good.
    from flowtrain.controller.run import run_training

    return run_training(resolved, resume)


def plan(config: ConfigLike, overrides: Sequence[str] = ()) -> Prepared:
    """What ``train`` would run: actors, steps, data sizes, memory. Starts nothing and needs no cluster."""
    resolved = resolve(config, overrides)
    from flowtrain.controller.prepare import prepare

    return prepare(resolved)


def pack(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    num_steps: int | None = None,
    compare: bool = False,
    lengths: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """What packing does to the first steps of a run: fill, balance, cost. Reads sizes alone and needs no cluster.

    num_steps: how many; by default 50, or as many as there are. compare: by every method, not by the configured one
    alone. lengths: a CSV with the columns ``num_image_tiles`` and ``num_tokens``, taken instead of the data; ``config``
    may be such a CSV as well, then ``overrides`` change the defaults. progress: is told how far it is.
    Raises ConfigError or DataError.
    """
    if num_steps is not None and num_steps < 1:
        raise ConfigError(f"num_steps (--steps) is {num_steps}; it must be at least 1")
    alone = not isinstance(config, RunConfig) and Path(config).suffix.lower() == ".csv"
    if alone and lengths is not None:
        raise ConfigError(f"both {config} and {lengths} are to be taken instead of data; give one of them")
    # The configuration is checked before anything that is slow to import.
    resolved = None if alone else resolve(config, overrides, check_paths=lengths is None)
    from flowtrain.controller import pack_csv
    from flowtrain.controller.pack import report_workload

    if resolved is None:
        workload = pack_csv.workload_alone(str(config), overrides, num_steps)
    elif lengths is not None:
        workload = pack_csv.workload_of(str(lengths), resolved, num_steps)
    else:
        from flowtrain.controller.predict import run_workload

        workload = run_workload(resolved, num_steps, progress)
    return report_workload(workload, compare, progress)


def doctor(config: ConfigLike, overrides: Sequence[str] = ()) -> DoctorReport:
    """What the cluster has for a run, its transports measured, and whether the run's pool fits; trains nothing.

    Raises ConfigError or DataError where the run could not work anywhere, ResourceError without a cluster.
    """
    resolved = resolve(config, overrides)
    from flowtrain.controller.doctor import examine

    return examine(resolved)


def resolve(config: ConfigLike, overrides: Sequence[str] = (), check_paths: bool = True) -> RunConfig:
    """The configuration with overrides applied; raises ConfigError. check_paths: data and models must exist."""
    if isinstance(config, RunConfig):
        return override_config(config, overrides, check_paths)
    return load_config(config, overrides, check_paths)
