"""Workloads of the benchmarks of modes: checkpoints and samples of each model and mix; runs by allocation method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _modes_actors
from _modes_data import Mix, cut_layers, full_mix, mix_of, model_settings, write_checkpoint, write_samples
from _modes_runs import Variant, Workload

import flowtrain
from flowtrain.config.load import load_config

MIXES = ("ai2d", "synthdog")
FULL = "full"
PLANNED_DEVICES = 4
"""Devices that a plan divides: a process with half a core each."""
PLANNED_TYPE = "h100"
"""Its data sheet stands for half a core: only ratios of FLOPs and bandwidths matter for degrees."""


@dataclass(frozen=True)
class Prepared:
    """A model's workloads and their mixes, by the mix's name."""

    label: str
    workloads: dict[str, Workload]
    mixes: dict[str, Mix]


def prepare(
    scratch: Path,
    *,
    traces: Path | None,
    models_dir: Path | None,
    num_layers: int,
    models: Sequence[str] | None,
    mixes: Sequence[str],
) -> list[Prepared]:
    """Write checkpoints and samples of all workloads; actors will count into a directory beside them.

    models: None for all that there are. Each model also gets the mix ``FULL``.
    """
    counters = scratch / "counters"
    counters.mkdir(exist_ok=True)
    os.environ[_modes_actors.COUNTERS_ENV] = str(counters)
    if models_dir is not None:
        cut_layers(models_dir, num_layers)
    found = []
    for label, setting in model_settings(models_dir, num_layers).items():
        if models and label not in models:
            continue
        model = scratch / label
        family = write_checkpoint(setting, model)
        chosen = {FULL: full_mix(setting.full_batch * setting.steps, setting)}
        for name in mixes:
            trace = None if traces is None else traces / f"{name}.csv"
            chosen[name] = mix_of(name, trace, setting.batch * setting.steps, setting.scale)
        workloads = {}
        for name, mix in chosen.items():
            directory = scratch / f"{label}-{name}"
            directory.mkdir(exist_ok=True)
            write_samples(mix, family.tokenizer, directory / "train.parquet")
            batch = setting.full_batch if name == FULL else setting.batch
            workloads[name] = Workload(setting, model, directory / "train.parquet", directory, counters, batch)
        found.append(Prepared(label, workloads, chosen))
    return found


def allocated(workload: Workload) -> list[Variant]:
    """Decoupled runs with the degrees of each allocation method; equal degrees are run once."""
    found: dict[tuple[str, ...], Variant] = {}
    for method in ("milp", "even", "flops"):
        config = load_config(workload.config_file(), [f"allocator.method={method}"])
        report = flowtrain.plan(config, devices=PLANNED_DEVICES, device=PLANNED_TYPE)
        degrees = tuple(change for change in report.overrides if "data_parallel_size" in change)
        name = f"allocated_{method}" if degrees not in found else f"{found[degrees].name}_{method}"
        found[degrees] = Variant(name, degrees)
    return list(found.values())
