"""FlowTrain from Python: ``flowtrain.train`` and ``flowtrain.plan``. The command line only wraps these."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from flowtrain.config.load import load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.observability.run_dir import check_run_dir

if TYPE_CHECKING:
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


def resolve(config: ConfigLike, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration with overrides applied; raises ConfigError."""
    if isinstance(config, RunConfig):
        return override_config(config, overrides)
    return load_config(config, overrides)
