"""Every policy of a pipeline on every mix: simulated at the papers' scale, on emulated devices, and on two real cores.

python benchmarks/policies.py [--parts simulated emulated real] [--mixes NAME ...] [--real-mixes NAME ...]
                              [--steps N] [--real-steps N] [--real-batch N] [--rounds N] [--keep FILE]
                              [--profile FILE] [--json] [--report FILE.md]

Policies of steps: `pipeline.policy` none, balanced and pipetune, and groups over the whole data set
(`data.grouping`). Policies of cuts: `pipeline.partition` by a word, the encoder's layers among the backbone's.
Mixes are drawn from the statistics of PipeTune's Table 1 and of the traces ai2d and synthdog. A rate is tokens/s of the
steps between the first and the last ones, and its simulated counterpart is of the very same steps. In a round each
policy runs once, in an order that rotates. With --keep, runs are kept in a file and a further call goes on.
Exits with 1 if two policies that train the same samples have different losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median

import _policies_rates
import ray
from _end_to_end_store import Record, Setting, Store, code_version
from _page import Page
from _policies_rates import ENDING, WARM_UP, measured, simulated
from _policies_scenes import CUT_POLICIES, PUBLISHED, STEP_POLICIES, Policy, RealModel, Scene, components
from _report import Figure, at_least, commit, emit, machine

import flowtrain

PARTS = ("simulated", "emulated", "real")
CLEAR = 0.02
"""Policies whose simulated rates differ by less than this share have no order."""
LOSS_TOLERANCE = 1e-4


@dataclass
class Compared:
    """A scene's rates by policy; measured: one a round, in the order of rounds."""

    scene: Scene
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The policy that the others are compared with."""
        return self.scene.policies[0].name

    def gain(self, name: str) -> float:
        """Predicted rate over the base's, minus 1."""
        return self.predicted[name] / self.predicted[self.base] - 1.0

    def gains(self, name: str) -> list[float]:
        """Measured rate over the base's, minus 1, of each round."""
        pairs = zip(self.measured.get(name, ()), self.measured.get(self.base, ()), strict=False)
        return [one / other - 1.0 for one, other in pairs]

    def pairs_in_order(self) -> tuple[int, int]:
        """Return pairs of policies that the simulator tells apart, and how many of them are measured in that order."""
        known = [name for name in self.predicted if self.measured.get(name)]
        clear = right = 0
        for one, other in combinations(known, 2):
            difference = self.predicted[one] / self.predicted[other] - 1.0
            if abs(difference) >= CLEAR:
                clear += 1
                right += (median(self.measured[one]) > median(self.measured[other])) == (difference > 0.0)
        return clear, right


class Bench:
    """Runs scenes, and notes what they took."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._number = 0

    def compare(self, scene: Scene, rounds: int, *, pinned: bool, changes: tuple[str, ...] = ()) -> Compared:
        """Simulate all policies of a scene, then run each of them once a round."""
        found = Compared(scene)
        for policy in scene.policies:
            found.predicted[policy.name] = simulated(scene.run_of(policy, "simulated", *changes))
        for number in range(rounds):
            turn = number % len(scene.policies)
            losses = {}
            for policy in (*scene.policies[turn:], *scene.policies[:turn]):
                record = self._record(scene, policy, number, changes, pinned)
                found.measured.setdefault(policy.name, []).append(record.tokens_per_s)
                if not policy.has_groups:
                    losses[policy.name] = record.first_loss
            _check_losses(scene, losses)
        return found

    def _record(self, scene: Scene, policy: Policy, number: int, changes: tuple[str, ...], pinned: bool) -> Record:
        kept = self._store.rounds(Setting(scene.model, scene.mix)).get(policy.name, {}).get(number)
        if kept is not None:
            return kept
        self._number += 1
        name = f"{scene.label}-{policy.name}-{self._number}".replace(" ", "-")
        rate, first_loss = measured(scene.run_of(policy, name, *changes), pinned=pinned)
        record = Record(scene.model, scene.mix, policy.name, number, rate, first_loss)
        self._store.add(record)
        print(f"{scene.label}: {policy.name} {rate:.0f} tokens/s", file=sys.stderr, flush=True)
        return record


def _check_losses(scene: Scene, losses: dict[str, float | None]) -> None:
    values = [each for each in losses.values() if each]
    if values and max(values) > (1.0 + LOSS_TOLERANCE) * min(values):
        sys.exit(f"{scene.label}: first losses differ: {losses}")


def real_scenes(directory: Path, args: argparse.Namespace, profile: Path) -> Iterator[tuple[Scene, str]]:
    """Yield each mix with steps and with cuts, and the file of the times of the model on both cores."""
    model = RealModel.write(directory, args.real_batch)
    for mix in args.real_mixes:
        for scene in model.scenes(mix, args.real_steps, directory, args.seed):
            if not profile.exists():
                report = flowtrain.profile(scene.config, devices=2)
                profile.write_text(report.profile.to_json())
            yield scene, str(profile.absolute())


def report_gains(page: Page, title: str, found: Sequence[Compared], note: str) -> None:
    """Add a table of gains over the first policy for all scenes that have these policies."""
    for policies in (STEP_POLICIES, CUT_POLICIES):
        mine = [each for each in found if each.scene.policies is policies]
        if not mine:
            continue
        others = [policy.name for policy in policies[1:]]
        rows = []
        for each in mine:
            cells = [_cell(each, name) for name in others]
            best = max(each.predicted, key=lambda name: each.predicted[name])
            fastest = max(each.measured, key=lambda name: median(each.measured[name])) if each.measured else "-"
            rows.append(f"{each.scene.model} | {each.scene.mix} | {' | '.join(cells)} | {best} | {fastest}")
        header = " | ".join(others)
        page.table(
            f"{title}: rates over `{policies[0].name}`",
            f"model | mix | {header} | fastest, simulated | fastest, measured",
            rows,
            note,
        )
    for each in found:
        for name in list(each.predicted)[1:]:
            runs = each.gains(name)
            label = f"{each.scene.label}.{name}".replace(" ", "_")
            page.figures.append(Figure(f"{label}.simulated", 100.0 * each.gain(name), "%"))
            if runs:
                spread = f"{100 * min(runs):+.1f} to {100 * max(runs):+.1f} in {len(runs)} rounds"
                page.figures.append(Figure(f"{label}.measured", 100.0 * median(runs), "%", note=spread))


def _cell(each: Compared, name: str) -> str:
    text, runs = f"{100 * each.gain(name):+.1f} %", each.gains(name)
    if not runs:
        return text
    spread = f" ({100 * min(runs):+.1f} to {100 * max(runs):+.1f})" if len(runs) > 1 else ""
    return f"{text}, measured {100 * median(runs):+.1f} %{spread}"


def report_order(page: Page, part: str, found: Sequence[Compared]) -> None:
    """Add how often the simulated order of two policies is the measured one."""
    counts = [each.pairs_in_order() for each in found]
    clear, right = sum(each for each, _ in counts), sum(each for _, each in counts)
    if clear:
        note = f"{right} of {clear} pairs whose simulated rates differ by {CLEAR:.0%} or more"
        page.figures.append(at_least(f"{part}.pairs_in_order", right / clear, "1", 1.0, note))
        page.lines += ["", f"Measured in the simulated order: {note}."]


def head(args: argparse.Namespace, version: str) -> list[str]:
    """The head of the report."""
    found = machine()
    command = (
        f"python benchmarks/policies.py --parts {' '.join(args.parts)} --mixes {' '.join(args.mixes)} --real-mixes "
        f"{' '.join(args.real_mixes)} --rounds {args.rounds} --steps {args.steps} --real-steps {args.real_steps} "
        f"--real-batch {args.real_batch} --seed {args.seed}"
    )
    return [
        "# Policies of a pipeline",
        "",
        f"`{command} --report docs/results/policies.md` at {commit()} ({version}) on {found['cpu']}, {found['cores']} "
        "cores. Rates are tokens/s; gains are over the first policy. Simulated: models of the papers' shapes on A100s "
        "by data sheet, with full recomputation. Emulated: the same, as runs whose devices wait instead of computing. "
        "Real: the quickstart's shapes on two pipeline ranks, each on its own core, with lengths of the mix scaled "
        "down; its simulated rates are from `flowtrain profile`. Nothing is fitted to these runs.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mixes", nargs="+", choices=list(components()), default=list(components()))
    parser.add_argument("--real-mixes", nargs="+", choices=list(components()), default=list(components()))
    parser.add_argument("--steps", type=int, default=10, help="of each run by data sheet")
    parser.add_argument("--real-steps", type=int, default=30, help="of each real run")
    parser.add_argument("--real-batch", type=int, default=32, help="samples of a step of real runs")
    parser.add_argument("--rounds", type=int, default=3, help="of real runs; emulated ones run once")
    parser.add_argument("--seed", type=int, default=101, help="of the drawn samples")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep runs there, and go on after those it has")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="times of real runs; measured if it is not there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    for key in ("steps", "real_steps"):
        if (given := getattr(args, key)) <= WARM_UP + ENDING:
            key = key.replace("_", "-")
            parser.error(f"--{key} ({given}) must be above {WARM_UP + ENDING}: the first and last do not count")
    if "real" in args.parts and len(os.sched_getaffinity(0)) < 2:
        sys.exit("this machine has one core, and two pipeline ranks need two; leave out the part 'real'")
    page, found = Page(), machine()
    shape = (f"{args.steps} steps", f"real {args.real_batch} x {args.real_steps}", f"seed {args.seed}")
    version = code_version(str(found["cpu"]), *shape)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        bench = Bench(Store(args.keep or directory / "runs.jsonl", version))
        if args.parts != ["simulated"]:
            ray.cloudpickle.register_pickle_by_value(_policies_rates)
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            run_parts(page, bench, directory, args)
        finally:
            ray.shutdown()
    if args.report:
        args.report.write_text("\n".join([*head(args, version), *page.lines]) + "\n")
    emit("policies", page.figures, args.json)


def run_parts(page: Page, bench: Bench, directory: Path, args: argparse.Namespace) -> None:
    """Run what was asked for, and report it."""
    if "simulated" in args.parts or "emulated" in args.parts:
        compared = []
        for model in PUBLISHED:
            for mix in args.mixes:
                runs = "emulated" in args.parts and model.runs_on(mix)
                if runs or "simulated" in args.parts:
                    scene = model.scene(mix, args.steps, directory, args.seed)
                    compared.append(bench.compare(scene, int(runs), pinned=False))
        report_gains(page, "Papers' models", compared, "Measured: on emulated devices, one run.")
        report_order(page, "emulated", compared)
    if "real" in args.parts:
        compared = [
            bench.compare(scene, args.rounds, pinned=True, changes=(f"allocator.profile={profile}",))
            for scene, profile in real_scenes(directory / "real", args, args.profile or directory / "profile.json")
        ]
        note = f"Measured: median of {args.rounds} rounds; in brackets the least and the most."
        note += (
            " Ranks, feeder and search share two cores, so a gain of a few percent is within the spread of the rounds, "
            "and processes that search take time from ranks, which they do not on machines with more cores."
        )
        report_gains(page, "Two real cores", compared, note)
        report_order(page, "real", compared)


if __name__ == "__main__":
    main()
