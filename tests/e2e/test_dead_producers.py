"""A run goes on when encoders and the feeder die, and ends as the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.pooling import PoolMember
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.data.feed import Feed
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.types.messages import FeedReport, PartReady, Remake
from flowtrain.types.plan import Unit
from flowtrain.types.samples import EVAL_POSITION_BASE, IMAGES_PART, TEXT_PART
from tests.e2e.disturbed import BATCH, check_same_end, config_of, json_lines

pytestmark = pytest.mark.e2e

FIRST_GATE, SECOND_GATE, THIRD_GATE = 4, 5, 12
"""Units that the backbone does not begin before certain things have happened to the producers."""
LATER = 5 * BATCH
"""First position of unit 6 (there is an evaluation behind step 3). What a rank has read it needs no more; at the second
gate it has read the unit that it is to run, and at most one microbatch more that waits and one in its hands."""
AHEAD = ("backbone.prefetch_microbatches=1", "scheduler.lookahead_steps=4")
"""So that ranks read little ahead, and producers make much."""
FEEDERS = ("feeder-0", "feeder-1", "feeder-2")
MORTAL = FEEDERS[:2]
"""Feeders that die at the same time."""
PARTS = (TEXT_PART, IMAGES_PART)
PATIENCE_S = 150.0


def note(config: RunConfig, name: str, deed: str, positions: Sequence[int] = ()) -> None:
    """Write down what this process did."""
    record = {"name": name, "pid": os.getpid(), "deed": deed, "positions": list(positions)}
    with (Path(config.runs_dir) / f"{config.name}.deeds").open("a") as file:
        file.write(json.dumps(record) + "\n")


def deeds(config: RunConfig, name: str, deed: str) -> list[dict[str, Any]]:
    """What the processes of a name did, in order."""
    path = Path(config.runs_dir) / f"{config.name}.deeds"
    records = json_lines(path) if path.exists() else []
    return [record for record in records if (record["name"], record["deed"]) == (name, deed)]


def positions_of(records: Iterable[dict[str, Any]]) -> set[int]:
    return {position for record in records for position in record["positions"]}


def die(config: RunConfig, name: str, holding: Sequence[int] = ()) -> None:
    note(config, name, "die", holding)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.02)


def ready_for_later(config: RunConfig, pid: int) -> set[int]:
    """Positions behind the first gate whose images an encoder-0 has handed in."""
    mine = positions_of(record for record in deeds(config, "encoder-0", "hand in") if record["pid"] == pid)
    return {position for position in mine if LATER <= position < EVAL_POSITION_BASE}


def is_made_again(config: RunConfig) -> bool:
    """Whether all that encoder-0 lost at its first death was encoded by somebody else, and feeders' losses are back."""
    death = deeds(config, "encoder-0", "die")[0]
    by_others = positions_of(
        record
        for name in ("encoder-0", "encoder-1")
        for record in deeds(config, name, "encode")
        if record["pid"] != death["pid"]
    )
    remade = [positions_of(deed for name in MORTAL for deed in deeds(config, name, f"remake {p}")) for p in PARTS]
    return {*death["positions"], *ready_for_later(config, death["pid"])} <= by_others and all(
        any(LATER <= position < EVAL_POSITION_BASE for position in positions) for positions in remade
    )


class DyingEncoder(Encoder):
    """encoder-0 dies with parts in its segment and a batch on its hands, then as it starts again; its third life lasts.

    encoder-1 stands back until the first death, so that there is work for encoder-0.
    """

    def run(self, link: CoordinatorLink) -> None:
        note(self._config, self._name, "live")
        if self._name == "encoder-0" and len(deeds(self._config, self._name, "live")) == 2:
            die(self._config, self._name)
        super().run(link)

    def encode(self, work: Work) -> dict[int, torch.Tensor]:
        if work.lease.batch.unit > FIRST_GATE:
            if self._name == "encoder-1":
                wait_for(lambda: bool(deeds(self._config, "encoder-0", "die")), "the death of encoder-0")
            elif not deeds(self._config, self._name, "die") and ready_for_later(self._config, os.getpid()):
                die(self._config, self._name, work.lease.needed)
        note(self._config, self._name, "encode", work.lease.needed)
        return super().encode(work)

    def _hand_in(self, member: PoolMember, ready: Sequence[PartReady], work: Work) -> None:
        super()._hand_in(member, ready, work)
        note(self._config, self._name, "hand in", [part.position for part in ready])


class DyingFeeder(Feeder):
    """Two of three die at the same time, each with its share of a unit put, but not reported.

    Texts and images of the units before lie in their segments.
    """

    def _size(self, member: PoolMember, feed: Feed, unit: Unit, consumed: frozenset[int]) -> FeedReport:
        report = super()._size(member, feed, unit, consumed)
        if self._name in MORTAL and unit.index > SECOND_GATE + 2 and not deeds(self._config, self._name, "die"):
            note(self._config, self._name, "about to die")
            wait_for(lambda: all(deeds(self._config, name, "about to die") for name in MORTAL), "the other's end")
            die(self._config, self._name)
        return report

    def _remake(self, feed: Feed, lost: Sequence[Remake]) -> tuple[PartReady, ...]:
        for part in PARTS:
            note(self._config, self._name, f"remake {part}", [o.ref.position for o in lost if part in o.parts])
        return super()._remake(feed, lost)


class WaitingRank(BackboneRank):
    """Holds units back until the producers have died as they are to, and what they lost is there again."""

    _num_begun = 0

    def _run_unit(self, prefetcher: Prefetcher) -> tuple[int, bool]:
        gates: dict[int, tuple[Callable[[], bool], str]] = {
            FIRST_GATE: (lambda: bool(deeds(self._config, "encoder-0", "die")), "the death of encoder-0"),
            SECOND_GATE: (lambda: is_made_again(self._config), "making the lost parts again"),
            THIRD_GATE: (lambda: len(deeds(self._config, "encoder-0", "live")) == 3, "the third life of encoder-0"),
        }
        if self._num_begun in gates:
            wait_for(*gates[self._num_begun])
        self._num_begun += 1
        return super()._run_unit(prefetcher)


def test_a_run_outlives_its_producers(world: Path, undisturbed: RunDir, ray_cluster: None) -> None:
    # So a death that counts twice is one too many.
    limit, feeders = "limits.max_encoder_restarts=2", f"data.num_feeders={len(FEEDERS)}"
    config = config_of(world, "bereaved", limit, feeders, *AHEAD)
    run_training(config, classes=ActorClasses(feeder=DyingFeeder, encoder=DyingEncoder, backbone=WaitingRank))
    check_same_end(run_dir(config), undisturbed)

    assert len({deed["pid"] for deed in deeds(config, "encoder-0", "live")}) == 3
    first_death = deeds(config, "encoder-0", "die")[0]
    assert first_death["positions"], "it died with a batch on its hands"
    assert ready_for_later(config, first_death["pid"]), "it died with finished parts that nobody had read"
    assert [len(deeds(config, name, "die")) for name in FEEDERS] == [1, 1, 0]


class DoomedEncoder(Encoder):
    """encoder-0 dies with a batch on its hands."""

    def encode(self, work: Work) -> dict[int, torch.Tensor]:
        if self._name == "encoder-0" and work.lease.batch.unit > FIRST_GATE:
            die(self._config, self._name, work.lease.needed)
        return super().encode(work)


def test_a_run_goes_on_without_an_encoder_that_may_not_start_again(
    world: Path, undisturbed: RunDir, ray_cluster: None
) -> None:
    config = config_of(world, "reduced", "limits.max_encoder_restarts=0")
    run_training(config, classes=ActorClasses(encoder=DoomedEncoder))
    check_same_end(run_dir(config), undisturbed)
    assert len(deeds(config, "encoder-0", "die")) == 1


class StoppedEncoder(Encoder):
    """encoder-0 is stopped with a batch on its hands; it answers nobody."""

    def encode(self, work: Work) -> dict[int, torch.Tensor]:
        if self._name == "encoder-0" and work.lease.batch.unit > FIRST_GATE:
            stop_once(self._config, self._name)
        return super().encode(work)


class StoppedFeeder(Feeder):
    """Stopped later, with a share of a unit put, but not reported."""

    def _size(self, member: PoolMember, feed: Feed, unit: Unit, consumed: frozenset[int]) -> FeedReport:
        report = super()._size(member, feed, unit, consumed)
        if unit.index > SECOND_GATE + 2:
            stop_once(self._config, self._name)
        return report


def stop_once(config: RunConfig, name: str) -> None:
    if not deeds(config, name, "stop"):
        note(config, name, "stop")
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.nightly
def test_producers_that_hang_are_named_and_cost_no_sample(
    world: Path, undisturbed: RunDir, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, "hanging", "limits.collective_timeout_s=15")
    run_training(config, classes=ActorClasses(feeder=StoppedFeeder, encoder=StoppedEncoder))
    check_same_end(run_dir(config), undisturbed)
    said = capfd.readouterr().err
    assert all(f"{name} hangs (it has not answered for" in said for name in ("encoder-0", "feeder-0"))
