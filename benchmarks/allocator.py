"""Time of the allocator's parts for 64 to 16,384 devices: enumeration, surrogate, program (model building included);
and of the comparison of all modes over all settings that a plan may choose, with the simulation of the fastest, for
every file of configs/models.

python benchmarks/allocator.py [--model YAML] [--device h200] [--solver auto] [--repeats N] [--json]

Of the parts: full recomputation, no choice of settings. With three encoders, each is the model's own encoder on a third
of the images. The global batch is 256 samples, or one per device if that is more. Everything runs on one core; times
are wall times, medians over the repeats after one run to warm up. The optimum is checked against the best of all
splits, found without a solver; exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from _report import Figure, at_most, emit

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.choices import backbone_choices
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.model_file import ModelFile, read_model_file
from flowtrain.allocator.modes import compare_modes
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.controller.planning.planned import planned_model
from flowtrain.controller.planning.request import device_times, surrogates
from flowtrain.costs.cluster import Cluster, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.types.run_plan import Mode

ROOT = Path(__file__).resolve().parents[1]
NUM_DEVICES = (64, 256, 1024, 16384)
TARGETS_S = {(256, 1): 0.15, (256, 3): 0.4, (16384, 1): 2.0, (16384, 3): 2.0}
COMPARISON_TARGETS_S = {256: 1.0, 16384: 5.0}
MODES: tuple[Mode, ...] = ("decoupled", "colocated", "monolithic", "disaggregated")
MAX_BATCH_PATCHES = 16384
SAME = 1e-6


def scaled(found: ModelFile, num_devices: int, count: int) -> ModelFile:
    """The model with ``count`` copies of its encoder, each with an even share of a sample's patches."""
    ((name, spec),) = found.model.encoders.items()
    num_images, num_patches = found.workload.images[name]
    names = [f"{name}{number}" for number in range(count)]
    model = replace(found.model, encoders=dict.fromkeys(names, spec))
    workload = replace(
        found.workload,
        images=dict.fromkeys(names, (num_images, num_patches // count)),
        global_batch_size=max(found.workload.global_batch_size, num_devices),
    )
    return replace(found, model=model, workload=workload)


def allocation(found: ModelFile, device: str, num_devices: int, solver: str) -> Allocation:
    """One allocation, from scratch."""
    setup = TrainingSetup(activation_checkpointing="full")
    cluster = Cluster((data_sheet_device_type(device, num_devices),))
    times = {each.name: Roofline(each, found.model, found.workload, setup) for each in cluster.device_types}
    limits = dict.fromkeys(found.model.encoders, MAX_BATCH_PATCHES)
    request = Request(cluster, found.model, found.workload, setup, MemoryBudget(), limits, chooses_reduction=True)
    surrogate = Surrogate(cluster, found.model, found.workload, setup, times)
    return allocate(request, lambda _: surrogate, Solver(solver))


def comparison_s(path: Path, device: str, num_devices: int, solver: str) -> float:
    """Seconds of one comparison of all modes over all settings, from scratch."""
    planned = planned_model(path)
    config = planned.config.model_copy(update={"mode": "auto"})
    asked = Request(
        Cluster((data_sheet_device_type(device, num_devices),)),
        planned.model,
        planned.workload,
        configured_setup(config, on_cpu=False),
        MemoryBudget(),
        dict.fromkeys(planned.model.encoders, MAX_BATCH_PATCHES),
        chooses_reduction=True,
        choices=backbone_choices(config, planned.model.backbone, planned.workload),
    )
    started = time.perf_counter()

    times_of = device_times(config, OperatorRules(), profile=None)
    compare_modes(asked, surrogates(times_of), Solver(solver), MODES, times_of=times_of)
    return time.perf_counter() - started


def comparisons(device: str, solver: str, repeats: int) -> list[Figure]:
    """The figures of all model files: medians over the runs."""
    figures = []
    gc.freeze()  # of torch, which is here for the report: `flowtrain plan` does not import it
    for path in sorted((ROOT / "configs" / "models").glob("*.yaml")):
        for num_devices, target in COMPARISON_TARGETS_S.items():
            seconds = [comparison_s(path, device, num_devices, solver) for _ in range(repeats + 1)][1:]
            name, worst = f"{num_devices}_devices.{path.stem}.all_modes", max(seconds)
            note = f"slowest of {len(seconds)}: {worst:.3f}"
            figures.append(at_most(name, median(seconds), "s", target, note))
    return figures


def is_optimal(found: Allocation) -> bool:
    """Whether no split is faster."""
    return found.rate >= max(point.rate for point in found.split_curve) * (1.0 - SAME)


def figures_of(runs: list[Allocation], num_devices: int, num_encoders: int) -> list[Figure]:
    """The figures of one number of devices: medians over the runs."""
    label, found = f"{num_devices}_devices.{num_encoders}_encoders", runs[0]
    total = median(each.timings.total_s for each in runs)
    worst = max(each.timings.total_s for each in runs)
    note = (
        f"{found.num_combinations:.2g} combinations, {found.num_variables} variables, {found.solver}; "
        f"slowest of {len(runs)}: {worst:.3f}"
    )
    target = TARGETS_S.get((num_devices, num_encoders))
    whole = Figure(f"{label}.total", total, "s", note=note)
    return [
        Figure(f"{label}.enumeration", median(each.timings.enumeration_s for each in runs), "s"),
        Figure(f"{label}.surrogate", median(each.timings.surrogate_s for each in runs), "s"),
        Figure(f"{label}.solve", median(each.timings.solve_s for each in runs), "s"),
        whole if target is None else at_most(f"{label}.total", total, "s", target, note),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "models" / "vlm_72b.yaml")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--solver", default="auto", choices=("auto", "highs", "gurobi", "cbc"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found, figures, wrong = read_model_file(arguments.model), [], []
    for num_devices in NUM_DEVICES:
        for num_encoders in (1, 3):
            several = scaled(found, num_devices, num_encoders)
            runs = [
                allocation(several, arguments.device, num_devices, arguments.solver)
                for _ in range(arguments.repeats + 1)
            ]
            figures += figures_of(runs[1:], num_devices, num_encoders)
            wrong += [f"{num_devices} devices, {num_encoders} encoders"] if not is_optimal(runs[0]) else []
    figures += comparisons(arguments.device, arguments.solver, arguments.repeats)
    emit("allocator", figures, arguments.json)
    for each in wrong:
        print(f"a split is faster than the optimum: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
