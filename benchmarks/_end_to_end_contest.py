"""Who runs in ``end_to_end.py`` on one model and mix, and how a run of each becomes a record."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import _modes_actors
import ray
from _end_to_end_auto import AUTO, PLANNED, Predicted, measure_profile, predict, stand_ins
from _end_to_end_peers import PEERS, PeerFailed, PeerRuns, how_of
from _end_to_end_store import MACHINE_S, Record, Setting, Store
from _machine_speed import SpeedProbe
from _modes_runs import VARIANTS, Variant, Workload
from _modes_workloads import PLANNED_DEVICES, allocated

from flowtrain.errors import FlowTrainError
from flowtrain.types.run_plan import Plan

LOSS_TOLERANCE = 1e-4
OURS = (*(each.name for each in VARIANTS), "allocated", PLANNED.rstrip("_"), AUTO)
"""Names that ``--only`` takes, beside the peers'."""
ATTEMPTS, SLOW = 3, 1.05
"""If the probe of the machine's speed took so much longer than in other runs of this setting since the benchmark was
started, a run is repeated, up to so many runs in all: a round's runs are compared, and days differ."""
BLIND = "llm_only"
"""It sees no images, so its losses are others."""


class WrongResult(Exception):
    """Two contestants disagree on the same samples."""


@dataclass(frozen=True)
class Contestant:
    """run: does one round's run. in_ray: needs this process's Ray. how: its settings in words, if they may change."""

    name: str
    run: Callable[[int], Record]
    in_ray: bool
    how: str | None = None


class RayWhenNeeded:
    """Ray runs while FlowTrain does and is away while a peer has the cores."""

    def __init__(self) -> None:
        ray.cloudpickle.register_pickle_by_value(_modes_actors)

    def be(self, wanted: bool) -> None:
        """Start it, or stop it."""
        if wanted and not ray.is_initialized():
            ray.init(address="local", num_cpus=PLANNED_DEVICES, include_dashboard=False, log_to_driver=False)
        elif not wanted and ray.is_initialized():
            ray.shutdown()


class Contest:
    """All contestants on one workload. directory: keeps the measured profile. only: names; None for all."""

    def __init__(
        self,
        setting: Setting,
        workload: Workload,
        store: Store,
        cluster: RayWhenNeeded,
        directory: Path,
        only: list[str] | None,
    ) -> None:
        self._setting, self._workload, self._store, self._cluster = setting, workload, store, cluster
        self._directory, self._only = directory, only
        self._peers = PeerRuns(setting, workload, directory / "peers")
        self._tokens = self._peers.step_tokens()
        self.predicted: Predicted | None = None
        self.stand_ins: dict[str, str] = {}
        self.failed: list[str] = []
        self._fastest_s = math.inf

    def _has(self, name: str) -> bool:
        return self._only is None or name in self._only

    def contestants(self) -> list[Contestant]:
        """All that were chosen, FlowTrain's first. Profiles, plans, and tries peers' settings where that is needed."""
        variants = [each for each in VARIANTS if self._has(each.name)]
        if self._has("allocated"):
            variants += allocated(self._workload)
        found = [self._ours(each, None) for each in variants]
        if self._has(AUTO) or self._has(PLANNED.rstrip("_")):
            found += self._planned(variants)
        peers = (self._peer(name) for name in PEERS if self._has(name))
        return found + [each for each in peers if each is not None]

    def _planned(self, variants: list[Variant]) -> list[Contestant]:
        """``auto``, and the modes whose own plan no variant runs; none if nothing could be planned."""
        try:
            predicted = self._predict(variants)
        except FlowTrainError as error:
            self._fail(f"{self._setting.label}.{AUTO}", error)
            return []
        names = [AUTO] if self._has(AUTO) else []
        if self._has(PLANNED.rstrip("_")):
            names += [name for name in self.stand_ins.values() if name.startswith(PLANNED)]
        return [self._ours(Variant(name, ()), predicted.plans[name.removeprefix(PLANNED)]) for name in names]

    def _predict(self, variants: list[Variant]) -> Predicted:
        profile = self._profile()
        self._cluster.be(not profile.exists())
        measure_profile(self._workload, profile)
        self.predicted = predict(self._workload, profile)
        self.stand_ins = stand_ins(self._workload, self.predicted, variants)
        say(f"{self._setting.label}: {AUTO} is {self.predicted.winner}; predicted samples/s {self.predicted.rates}")
        return self.predicted

    def _profile(self) -> Path:
        """The file of the profile: one that is there, of the newest version that counts."""
        paths = [
            self._directory / f"{self._setting.label}.{version.replace(' ', '-')}.profile.json"
            for version in self._store.versions
        ]
        return next((path for path in paths if path.exists()), paths[0])

    def _ours(self, variant: Variant, plan: Plan | None) -> Contestant:
        how = ", ".join(variant.overrides) if plan is None else words_of(plan)

        def run(number: int) -> Record:
            directory = f"{variant.name}-{number}"
            measured = self._workload.run(directory, variant.overrides, plan=plan)
            shutil.rmtree(self._workload.scratch / directory)
            first = self._workload.setting.warm_up
            expected = tuple(self._tokens[first : first + len(measured.tokens)])
            if measured.tokens != expected:
                raise WrongResult(
                    f"{self._setting.label}: {variant.name} trained {measured.tokens} tokens, not {expected}"
                )
            details = {
                "starved_share": measured.starved_share,
                "peak_nbytes": float(measured.peak_nbytes),
                "copied_nbytes": measured.copied / len(measured.tokens),
                "fill": measured.fill,
                **{f"busy_s.{role}": seconds for role, seconds in measured.busy_s.items()},
            }
            loss = None if variant.name == BLIND else measured.losses[0]
            place = (self._setting.model, self._setting.mix)
            return Record(*place, variant.name, number, measured.tokens_per_s, loss, how, details)

        return Contestant(variant.name, run, in_ray=True, how=how)

    def _peer(self, name: str) -> Contestant | None:
        """A peer with the fastest of its settings; None if all failed."""
        jobs = {how_of(job): job for job in self._peers.jobs(PEERS[name])}
        for how in [each for each in jobs if each not in self._store.trials(self._setting, name)]:
            self._cluster.be(False)
            try:
                trial = self._peers.trial(name, jobs[how])
            except PeerFailed as error:
                self._fail(f"{self._setting.label}.{name}, a trial", error)
                continue
            self._store.add(trial)
            say(f"{self._setting.label}.{name}: {how}: {trial.tokens_per_s:.0f} tokens/s in a trial")
        tried = self._store.trials(self._setting, name)
        if not tried:
            return None
        best = jobs[max(tried, key=tried.__getitem__)]
        return Contestant(name, lambda number: self._peers.run(name, best, number), in_ray=False)

    def _fail(self, where: str, error: Exception) -> None:
        self.failed.append(f"{where}: {type(error).__name__}: {error}")
        say(self.failed[-1])

    def round(self, contestants: list[Contestant], number: int) -> None:
        """Run, in turn, all that this round still lacks; ``failed`` gets what failed."""
        shift = number % max(1, len(contestants))
        for each in contestants[shift:] + contestants[:shift]:
            if self._store.has(self._setting, each.name, number, each.how):
                continue
            self._cluster.be(each.in_ray)
            where = f"{self._setting.label}.{each.name}, round {number + 1}"
            try:
                record = self._measured(each, number, where)
            except WrongResult:
                raise
            except Exception as error:  # one contestant's failure must not end the others' rounds
                self._fail(where, error)
                continue
            self._store.add(record)
            loss = "" if record.first_loss is None else f"; loss {record.first_loss:.5f}"
            say(f"{where}: {record.tokens_per_s:.0f} tokens/s{loss}; {record.how}")

    def _measured(self, contestant: Contestant, number: int, where: str) -> Record:
        """The run, repeated while the machine was slower than in others; of all attempts the one at its fastest."""
        attempts: list[Record] = []
        for _ in range(ATTEMPTS):
            with SpeedProbe() as probe:
                record = contestant.run(number)
            attempts.append(replace(record, details={**record.details, MACHINE_S: probe.seconds}))
            self._fastest_s = min(self._fastest_s, probe.seconds)
            if probe.seconds <= SLOW * self._fastest_s:
                break
            say(f"{where}: the machine was slow ({1e3 * probe.seconds:.2f} ms a probe), so the run is repeated")
        return min(attempts, key=lambda each: each.details[MACHINE_S])


def words_of(plan: Plan) -> str:
    """A plan's mode and degrees, and what else it chose."""
    encoders = ", ".join(f"{name} dp={module.data_parallel_size}" for name, module in plan.encoders.items())
    backbone = plan.backbone.degrees
    words = [plan.mode, encoders, f"backbone dp={backbone.dp} pp={backbone.pp} tp={backbone.tp}"]
    if plan.backbone_settings is not None:
        words += [f"{key[-1]}={value}" for key, value in plan.backbone_settings.settings().items()]
    return ", ".join(word for word in words if word)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)
