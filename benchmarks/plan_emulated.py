"""The plan against other splits of emulated devices: is the allocator's choice the fastest when it runs?

python benchmarks/plan_emulated.py [--profiles N] [--seed S] [--devices N] [--json]

Devices are EMULATED: each profile is drawn at random (8 to 16 devices, an encoder that costs from an eighth of the
backbone to four times as much), and modules wait for the times in the profile's tables instead of computing. Everything
else is real: coordinator, flow, step planner, feeder, the pool in shared memory, and the classes of encoders and
backbone ranks, as threads of a few processes. Ranks wait for each other at collectives, stages for each other.

For each profile the plan is computed as by ``flowtrain plan --profile``. Of all feasible splits that use every device,
the benchmark runs those predicted within 15 % of the plan's rate, and for every number of encoder devices at least the
--each that are predicted fastest. Then the plan and the fastest others run again, interleaved and for longer; the best
of their medians is the best split found. Waits of far slower splits are shortened, so that trying them takes no longer.
Each split that is run is simulated too, on its own batches: its error stands beside the formula's.
Meant for an idle machine (--time-scale 5 makes all waits as many times as long); exits with 1 if an actor fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from _report import Figure, at_least, at_most, emit
from rich.console import Console
from rich.table import Table
from shared.emulated_prediction import simulated_rate
from shared.emulated_run import Emulation, Measured
from shared.emulated_splits import Split, all_splits, planned_split, worth_trying
from shared.emulated_world import MAX_DEVICES, MIN_DEVICES, PERIOD_STEPS, VISION, World, draw_ratios, draw_world

TARGET = 0.97
NEAR = 0.85
"""Every split that is predicted above this share of the plan's rate is run; similar splits have similar errors."""


@dataclass(frozen=True)
class Comparison:
    """One emulated profile: its plan, the first pass over the splits, the second over the plan and the best others.

    num_splits: feasible splits that use all devices; ``tried`` has those that were run. simulated: their samples/s.
    """

    world: World
    plan: Split
    num_splits: int
    tried: dict[Split, Measured]
    finals: dict[Split, list[Measured]]
    simulated: dict[Split, float]

    def rate(self, split: Split) -> float:
        """Samples/s, median of the second pass."""
        return median(each.rate for each in self.finals[split])

    @property
    def best(self) -> Split:
        """The fastest found."""
        return max(self.finals, key=self.rate)

    @property
    def ratio(self) -> float:
        """The plan's measured rate over the best one's."""
        return self.rate(self.plan) / self.rate(self.best)

    @property
    def spread(self) -> float:
        """Spread of the plan's repetitions: (largest - smallest) / median."""
        rates = [each.rate for each in self.finals[self.plan]]
        return (max(rates) - min(rates)) / median(rates)

    @property
    def errors(self) -> list[float]:
        """|predicted / measured - 1| of every split that was run."""
        return [abs(split.rate / rate - 1.0) for split, rate in self._measured.items()]

    @property
    def simulated_errors(self) -> list[float]:
        """|simulated / measured - 1| of every split that was run."""
        return [abs(self.simulated[split] / rate - 1.0) for split, rate in self._measured.items()]

    @property
    def _measured(self) -> dict[Split, float]:
        """Samples/s of every split that was run, by its second pass if it has one."""
        return {split: each.rate for split, each in self.tried.items()} | {s: self.rate(s) for s in self.finals}

    @property
    def last_runs(self) -> list[Measured]:
        """The runs of the second pass."""
        return [each for runs in self.finals.values() for each in runs]


def compare(emulation: Emulation, world: World, arguments: argparse.Namespace, directory: Path) -> Comparison:
    """Run the plan and the other splits of one emulated profile."""
    request = world.request
    splits = all_splits(request, world.surrogate(request), VISION)
    plan = planned_split(world.allocation(), splits, VISION)
    tried: dict[Split, Measured] = {}
    simulated: dict[Split, float] = {}
    for split in dict.fromkeys([plan, *worth_trying(splits, arguments.each, NEAR * plan.rate)]):
        tried[split] = emulation.run(world, split, arguments.steps, directory)
        simulated[split] = simulated_rate(world, split, arguments.steps)
        _say(
            f"{world.name}: {split}: predicted {split.rate:.1f}, simulated {simulated[split]:.1f}, measured "
            f"{tried[split].rate:.1f}"
        )
    others = sorted((s for s in tried if s != plan), key=lambda split: tried[split].rate, reverse=True)
    finals: dict[Split, list[Measured]] = {split: [] for split in [plan, *others[: arguments.contenders]]}
    for repeat in range(arguments.repeats):
        order = list(finals)
        for split in order[repeat % len(order) :] + order[: repeat % len(order)]:
            finals[split].append(emulation.run(world, split, arguments.final_steps, directory))
    simulated |= {split: simulated_rate(world, split, arguments.final_steps) for split in finals}
    return Comparison(world, plan, len(splits), tried, finals, simulated)


def figures_of(comparisons: Sequence[Comparison], duration_s: float) -> list[Figure]:
    """Figures of each emulated profile, then over all."""
    figures = []
    for each in comparisons:
        name, found = f"emulated.{each.world.name}", len(each.tried)
        note = f"{each.world.num_devices} emulated devices, encoder/backbone cost {each.world.ratio:.2f}; {each.plan}"
        figures += [
            Figure(f"{name}.predicted_rate", each.plan.rate, "samples/s", note=note),
            Figure(f"{name}.plan_rate", each.rate(each.plan), "samples/s", note=f"spread {100 * each.spread:.1f} %"),
            Figure(
                f"{name}.best_rate",
                each.rate(each.best),
                "samples/s",
                note=f"{each.best}; {found} of {each.num_splits}",
            ),
            at_least(f"{name}.plan_over_best", each.ratio, "1", TARGET),
        ]
    ratios = [each.ratio for each in comparisons]
    errors = [error for each in comparisons for error in each.errors]
    simulated = [error for each in comparisons for error in each.simulated_errors]
    runs = [run for each in comparisons for run in each.last_runs]
    num_stalled = sum(run.has_stalled for each in comparisons for run in [*each.tried.values(), *each.last_runs])
    return [
        *figures,
        at_least("emulated.plan_over_best_min", min(ratios), "1", TARGET, f"of {len(ratios)} emulated profiles"),
        Figure("emulated.plan_over_best_median", median(ratios), "1"),
        Figure("emulated.plan_over_best_max", max(ratios), "1"),
        Figure(
            "emulated.prediction_error_median",
            median(errors),
            "1",
            note=f"{len(errors)} splits, |predicted/measured - 1|",
        ),
        Figure("emulated.prediction_error_worst", max(errors), "1"),
        at_most("emulated.simulation_error_median", median(simulated), "1", 0.02, "|simulated/measured - 1|"),
        at_most("emulated.simulation_error_worst", max(simulated), "1", 0.1),
        Figure("emulated.cores_busy", mean(each.busy for each in runs), "1", note="by the emulation, second pass"),
        Figure("emulated.machine_busy", mean(each.machine_busy for each in runs), "1", note="by all on the machine"),
        Figure("emulated.stalled_runs", num_stalled, "runs", note="with a step more than 1 s above the mean"),
        Figure("emulated.duration", duration_s, "s", note=f"{os.cpu_count()} cores"),
    ]


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """One row an emulated profile."""
    columns = (
        "profile",
        "devices",
        "enc/bb cost",
        "plan",
        "predicted",
        "measured",
        "best split found",
        "rate",
        "plan/best",
    )
    table = Table(*columns, title="Emulated devices: the plan and the best split found, samples/s")
    for each in comparisons:
        table.add_row(
            each.world.name,
            str(each.world.num_devices),
            f"{each.world.ratio:.2f}",
            str(each.plan),
            f"{each.plan.rate:.1f}",
            f"{each.rate(each.plan):.1f}",
            "the plan" if each.best == each.plan else str(each.best),
            f"{each.rate(each.best):.1f}",
            f"{each.ratio:.3f}",
        )
    tried, num_splits = sum(len(each.tried) for each in comparisons), sum(each.num_splits for each in comparisons)
    table.caption = (
        f"{tried} of {num_splits} splits were run: all that are predicted near the plan, and the best predicted ones "
        "for each number of encoder devices"
    )
    return table


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=10, help="emulated profiles to draw")
    parser.add_argument("--only", type=int, nargs="+", help="run only these of them, by number from 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="emulated devices; by default drawn, 8 to 16 a profile")
    parser.add_argument("--each", type=int, default=2, help="splits to run for each number of encoder devices")
    parser.add_argument("--contenders", type=int, default=3, help="splits in addition to the plan in the second pass")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions in the second pass")
    parser.add_argument("--steps", type=int, default=2 * PERIOD_STEPS, help="measured steps in the first pass")
    parser.add_argument("--final-steps", type=int, default=4 * PERIOD_STEPS, help="measured steps in the second pass")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of all waits, for a busy machine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in ("steps", "final_steps"):
        if getattr(arguments, name) % PERIOD_STEPS:
            parser.error(f"--{name.replace('_', '-')} must be a multiple of {PERIOD_STEPS}, after which data repeat")
    if arguments.devices is not None and not MIN_DEVICES <= arguments.devices <= MAX_DEVICES:
        parser.error(f"--devices ({arguments.devices}) must be from {MIN_DEVICES} to {MAX_DEVICES}")
    if not set(arguments.only or ()) <= set(range(arguments.profiles)):
        parser.error(f"--only ({arguments.only}) must be numbers from 0 to {arguments.profiles - 1}, of --profiles")
    return arguments


def main() -> None:
    arguments, started_s = _arguments(), time.monotonic()
    ratios = draw_ratios(arguments.profiles, arguments.seed)
    numbers = range(arguments.profiles) if arguments.only is None else arguments.only
    comparisons = []
    with tempfile.TemporaryDirectory() as name, Emulation(arguments.time_scale) as emulation:
        directory = Path(name)
        for number in numbers:
            world = draw_world(
                f"profile-{number}", ratios[number], arguments.seed, number, arguments.devices, directory
            )
            comparisons.append(compare(emulation, world, arguments, directory))
            found = comparisons[-1]
            _say(f"{world.name}: plan {found.plan} {found.rate(found.plan):.1f}, best {found.best} {found.ratio:.3f}")
    if not arguments.json:
        Console(width=max(160, Console().width)).print(table_of(comparisons))
    emit("plan_emulated", figures_of(comparisons, time.monotonic() - started_s), arguments.json)


if __name__ == "__main__":
    main()
