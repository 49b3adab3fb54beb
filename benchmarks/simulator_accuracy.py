"""How near the simulator is to real runs on two cores: order uncalibrated, error calibrated, peak memory.

python benchmarks/simulator_accuracy.py [--quick] [--only rates] [--models-dir DIRECTORY] [--traces DIRECTORY]
    [--rounds N] [--keep DIRECTORY] [--json]

Every case (a mode with dp, pp or tp of two, or one encoder beside one backbone rank; both schedules) trains several
mixes of samples in turn, several rounds, every process pinned to its core. A profile is measured first (``flowtrain
profile``); each case is simulated with its own degrees on it, over the very batches of the steps that are measured. All
runs of a case and mix have the same batches, and each step counts with its median time.
Calibrated predictions use ``flowtrain calibrate`` on the same case's runs of the other mixes, never on the runs that
are tested. Peak memory is what the living tensors of the fullest backbone rank take, counted at each new one in a run
of its own (as benchmarks/memory.py does); what a plan reserves, for full microbatches, stands beside it. Runs use the
quickstart's model, and with --models-dir (written by scripts/real_models.py) a second one. Exits with 1 if a run fails.

Other guests of the host change the machine's speed by several percent from run to run. A probe watches it. A run does
not count if its probe was more than 5 % slower than that of the fastest one of the same case and mix; others take its
place, in up to twice as many rounds. Errors of calibrated predictions also stand there scaled by the probe's times.

--keep: profiles and timed runs stay there; what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import _modes_actors
import _simulator_accuracy
import numpy as np
import ray
from _modes_data import QUICKSTART, REAL
from _modes_runs import Workload
from _modes_workloads import FULL, MIXES, prepare
from _report import Figure, at_least, at_most, emit
from _simulator_accuracy import (
    CASES,
    COUNTED_STEPS,
    ENDING,
    MEMORY_ENV,
    QUICK,
    WARM_UP,
    Case,
    Ran,
    config_of,
    counted_peak,
    planned_peak,
    predicted_peak,
    predicted_rate,
    run,
)

import flowtrain
from flowtrain.allocator.degrees import degree_faults
from flowtrain.controller.calibration import calibrate_runs
from flowtrain.costs.profile import Profile, read_profile
from flowtrain.errors import FlowTrainError
from flowtrain.models.families.registry import family_from_config

STEPS, QUICK_STEPS = 35, 15
ROUNDS, QUICK_ROUNDS = 3, 1
QUIET = 1.05
"""A run counts if its probe took at most as many times as long as the fastest one of the same case and mix."""
MOST_ROUNDS = 2
"""Times as many rounds as asked for, at most, until so many runs count."""
ALL_MIXES = (*MIXES, FULL)


@dataclass(frozen=True)
class Tested:
    """The rate of one case on one mix, in samples/s. calibrated: by ``others``, runs of other mixes; None without."""

    label: str
    runs: tuple[Ran, ...]
    plain: float
    calibrated: float | None
    others: tuple[Ran, ...] = ()

    @property
    def rate(self) -> float:
        """Of the median times of its steps, since all runs have the same batches: a disturbed step does not count."""
        seconds = [median(each) for each in zip(*(run.seconds for run in self.runs), strict=True)]
        return sum(self.runs[0].num_samples) / sum(seconds)

    @property
    def spread(self) -> float:
        """Between its fastest and its slowest run, of the rate."""
        return (max(each.rate for each in self.runs) - min(each.rate for each in self.runs)) / self.rate

    @property
    def error(self) -> float:
        """Of the rate without calibration, signed."""
        return self.plain / self.rate - 1.0

    @property
    def calibrated_error(self) -> float | None:
        """Of the rate with calibration, signed."""
        return None if self.calibrated is None else self.calibrated / self.rate - 1.0

    @property
    def scaled_error(self) -> float | None:
        """The same if the prediction is scaled to the machine's speed in the runs that are tested."""
        if self.calibrated is None:
            return None
        others, own = (median(run.machine_s for run in runs) for runs in (self.others, self.runs))
        return self.calibrated * others / own / self.rate - 1.0


@dataclass(frozen=True)
class Counted:
    """The peak memory of one case on one mix, in bytes."""

    label: str
    measured: int
    predicted: int
    planned: int

    @property
    def error(self) -> float:
        """Signed."""
        return self.predicted / self.measured - 1.0


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's; 1 where both have the same order."""
    first, second = (np.argsort(np.argsort(each)).astype(np.float64) for each in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def measured_profile(workload: Workload, case: Case, steps: int, file: Path) -> Profile:
    """Return a model's profile from a file; one that is not there is measured on both cores, and written."""
    if not file.exists():
        config = config_of(workload, case, "profiled", steps)
        report = flowtrain.profile(config, devices=2, progress=lambda what: _say(f"measuring {what}"))
        file.write_text(report.profile.to_json())
    return read_profile(file)


def possible(label: str, workload: Workload, cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose degrees a model allows; a line names each other one."""
    found = []
    for case in cases:
        config = config_of(workload, case, case.name, STEPS)
        spec = family_from_config(config).model_spec.backbone
        faults = degree_faults(case.degrees, spec, chunks_per_rank=config.pipeline.chunks)
        if faults:
            _say(f"{label}.{case.name} is skipped: {faults[0].text}")
        else:
            found.append(case)
    return found


def quiet(runs: Sequence[Ran]) -> list[Ran]:
    """Return the runs of a case and mix that count, by the machine's speed alone."""
    limit = QUIET * min((each.machine_s for each in runs), default=0.0)
    return [each for each in runs if each.machine_s <= limit]


def test_rates(
    label: str, workloads: dict[str, Workload], cases: Sequence[Case], steps: int, rounds: int, file: Path
) -> list[Tested]:
    """Run and simulate all cases on all mixes of a model, the mixes in turn. file: its profile, read if it is there."""
    profile = measured_profile(next(iter(workloads.values())), cases[0], steps, file)
    tested = []
    for case in cases:
        runs: dict[str, list[Ran]] = {mix: [] for mix in workloads}
        for number in range(MOST_ROUNDS * rounds):
            for mix, workload in workloads.items():
                if len(quiet(runs[mix])) >= rounds:
                    continue
                name = _run_name(label, case.name, mix, str(number))
                runs[mix].append(run(config_of(workload, case, name, steps), case))
                _say(f"{name}: {runs[mix][-1].rate:.2f} samples/s, machine {1e3 * runs[mix][-1].machine_s:.2f} ms")
        runs = {mix: quiet(every) for mix, every in runs.items()}
        for mix, workload in workloads.items():
            config = config_of(workload, case, f"{case.name}-{mix}-asked", steps)
            others = tuple(each for other, found in runs.items() if other != mix for each in found)
            directories = [each.directory for each in others]
            fitted = predicted_rate(config, case, calibrate_runs(directories, file).profile) if others else None
            plain = predicted_rate(config, case, profile)
            tested.append(Tested(f"{label}.{case.name}.{mix}", tuple(runs[mix]), plain, fitted, others))
            _say_tested(tested[-1])
    return tested


def test_memory(label: str, workloads: dict[str, Workload], cases: Sequence[Case]) -> list[Counted]:
    """Count the memory of all cases on all mixes of a model."""
    counted = []
    for case in cases:
        for mix, workload in workloads.items():
            name = f"{label}.{case.name}.{mix}"
            config = config_of(workload, case, _run_name(label, case.name, mix, "counted"), COUNTED_STEPS)
            each = Counted(name, counted_peak(config), predicted_peak(config, case), planned_peak(config, case))
            _say(f"{name}: {each.measured} bytes, {100 * each.error:+.1f} %, planned {each.planned}")
            counted.append(each)
    return counted


def _run_name(*parts: str) -> str:
    return "-".join(parts).replace("+", "-")


def figures_of(tested: Sequence[Tested], counted: Sequence[Counted]) -> list[Figure]:
    """Each case's errors, then what the requirement names."""
    figures = []
    for each in tested:
        note = f"measured {each.rate:.3g} samples/s, {len(each.runs)} runs within {100 * each.spread:.1f} %"
        if each.calibrated_error is not None and each.scaled_error is not None:
            note += f", calibrated {100 * each.calibrated_error:+.1f} %, scaled {100 * each.scaled_error:+.1f} %"
        figures.append(Figure(f"{each.label}.error", each.error, "of the rate", note=note))
    for count in counted:
        note = f"measured {count.measured / 2**20:.1f} MiB, planned {count.planned / 2**20:.1f}"
        figures.append(Figure(f"{count.label}.peak_error", count.error, "of the peak", note=note))
    if tested:
        figures += _rate_figures(tested)
    if counted:
        errors = [abs(each.error) for each in counted]
        note = f"median {median(errors):.3f}"
        figures.append(at_most("peak memory, worst error", max(errors), "of the peak", 0.05, note))
    return figures


def _rate_figures(tested: Sequence[Tested]) -> Iterator[Figure]:
    models, mixes = ([_correlation(group) for group in _groups(tested, each)] for each in (1, 2))
    yield at_least(
        "rank correlation, uncalibrated", min(models), "1", 0.95, f"of a model's runs, least of {len(models)}"
    )
    yield Figure("rank correlation within a mix, uncalibrated", min(mixes), "1", note=f"least of {len(mixes)}")
    yield Figure("mean error, uncalibrated", fmean(abs(each.error) for each in tested), "of the rate")
    known = [abs(each.calibrated_error) for each in tested if each.calibrated_error is not None]
    if known:
        note = f"median {median(known):.4f}, worst {max(known):.4f}"
        yield at_most("mean error, calibrated on other runs", fmean(known), "of the rate", 0.024, note)
        scaled = [abs(each.scaled_error) for each in tested if each.scaled_error is not None]
        note = f"median {median(scaled):.4f}, worst {max(scaled):.4f}"
        yield Figure("the same, scaled to the machine's speed", fmean(scaled), "of the rate", note=note)
    yield Figure("spread of a case's runs", median(each.spread for each in tested), "of the rate", note="median")
    machine = [run.machine_s for each in tested for run in each.runs]
    note = f"from {1e3 * min(machine):.2f} ms, median {1e3 * median(machine):.2f} ms"
    yield Figure("probe of the machine's speed, slowest", 1e3 * max(machine), "ms", note=note)


def _correlation(group: Sequence[Tested]) -> float:
    return rank_correlation([each.plain for each in group], [each.rate for each in group])


def _groups(tested: Sequence[Tested], num_parts: int) -> list[list[Tested]]:
    """Cases by model (1), or by model and mix (2)."""
    groups: dict[tuple[str, ...], list[Tested]] = {}
    for each in tested:
        model, _, rest = each.label.partition(".")
        groups.setdefault((model, rest.rpartition(".")[2])[:num_parts], []).append(each)
    return list(groups.values())


def _say_tested(each: Tested) -> None:
    calibrated = each.calibrated_error
    more = "" if calibrated is None else f", calibrated {100 * calibrated:+.1f} %"
    _say(f"{each.label}: {100 * each.error:+.1f} %{more}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases and steps, two mixes, the quickstart's model")
    parser.add_argument("--only", choices=("rates", "memory"), help="memory needs no idle machine")
    parser.add_argument("--traces", type=Path, help="directory of ai2d.csv and synthdog.csv")
    parser.add_argument("--models-dir", type=Path, help="where scripts/real_models.py wrote its models")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers that are kept of SmolLM2")
    parser.add_argument("--models", nargs="+", choices=(QUICKSTART, REAL), help="default: both, or the first")
    parser.add_argument("--mixes", nargs="+", choices=ALL_MIXES, help="default: all, or the traces' with --quick")
    parser.add_argument("--cases", nargs="+", choices=[each.name for each in CASES], help="default: all")
    parser.add_argument("--steps", type=int, help=f"of each run; by default {STEPS}, or {QUICK_STEPS} with --quick")
    parser.add_argument("--rounds", type=int, help=f"runs of each mix; by default {ROUNDS}, or {QUICK_ROUNDS}")
    parser.add_argument("--keep", type=Path, help="directory that keeps profiles and timed runs for later calls")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if steps <= WARM_UP + ENDING:
        parser.error(f"--steps ({steps}) must be above {WARM_UP + ENDING}: the first and last do not count")
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this machine has one core, but two devices need two")
    names = args.cases or (QUICK if args.quick else [each.name for each in CASES])
    cases = [each for each in CASES if each.name in names]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all later processes inherit it
    tested: list[Tested] = []
    counted: list[Counted] = []
    failed = ""
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as memory:
        os.environ[MEMORY_ENV] = memory
        scratch = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        models = args.models or ([QUICKSTART] if args.quick else [QUICKSTART, REAL])
        prepared = prepare(
            scratch,
            traces=args.traces,
            models_dir=args.models_dir,
            num_layers=args.layers,
            models=models,
            mixes=MIXES,
        )
        for module in (_modes_actors, _simulator_accuracy):
            ray.cloudpickle.register_pickle_by_value(module)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            for each in prepared:
                mixes = {name: each.workloads[name] for name in args.mixes or (MIXES if args.quick else ALL_MIXES)}
                mine = possible(each.label, next(iter(mixes.values())), cases)
                if args.only != "memory":
                    file = scratch / f"{each.label}.json"
                    tested += test_rates(each.label, mixes, mine, steps, rounds, file)
                if args.only != "rates":
                    counted += test_memory(each.label, mixes, mine)
        except FlowTrainError as error:
            failed = f"a run failed: {error}"
        finally:
            ray.shutdown()
    if tested or counted:
        emit("simulator_accuracy", figures_of(tested, counted), args.json)
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
