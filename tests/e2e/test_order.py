"""No batch barrier: a microbatch runs as soon as its own positions are ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.reading import Fetched
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.types.plan import StepPlan
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

NUM_SAMPLES = 8
HELD_POSITION = 3
NUM_IN_VAIN = 5
"""Answers that bring no microbatch before it counts as held back."""


class HoldingEncoder(Encoder):
    """Hands everything in at once but the held position, which waits until the test opens the gate."""

    def _hand_in(self, member, ready, work) -> None:  # type: ignore[no-untyped-def]
        if any(part.position == HELD_POSITION for part in ready):
            threading.Thread(target=self._hand_in_later, args=(member, ready, work), daemon=True).start()
            return
        super()._hand_in(member, ready, work)
        with (Path(self._config.runs_dir) / "encoded").open("a") as file:
            file.writelines(f"{part.position}\n" for part in ready)

    def _hand_in_later(self, member, ready, work) -> None:  # type: ignore[no-untyped-def]
        gate = Path(self._config.runs_dir) / "gate"
        while not gate.exists():
            time.sleep(0.02)
        super()._hand_in(member, ready, work)


class NotingRank(BackboneRank):
    """Notes each microbatch that it finished: its slot and the positions in it."""

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        super()._ran(plan, fetched)
        positions = [sample.position for sample in plan.slots[fetched.slot][self._dp_rank].samples]
        with (Path(self._config.runs_dir) / "finished").open("a") as file:
            file.write(f"{fetched.slot} {len(plan.slots)} {HELD_POSITION in positions}\n")


class NotingCoordinator(Coordinator):
    """Notes each answer to a rank that asked for a microbatch, and answers soon where there is none."""

    runs_dir: str

    def __init__(self, make_flow: Callable[[], Any], *rest: object) -> None:
        super().__init__(make_flow, poll_s=0.1)

    async def locate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        answer = await super().locate(*args, **kwargs)
        with (Path(self.runs_dir) / "asked").open("a") as file:
            file.write("asked\n")
        return answer


def finished(config: RunConfig) -> list[tuple[int, int, bool]]:
    """(slot, slots of the step, whether the held position is in it) of the microbatches that ran, in order."""
    path = Path(config.runs_dir) / "finished"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(slot), int(count), held == "True") for slot, count, held in (line.split() for line in lines)]


def num_asked(config: RunConfig) -> int:
    """Questions for a microbatch that were answered."""
    path = Path(config.runs_dir) / "asked"
    return len(path.read_text().split()) if path.exists() else 0


def wait_until_settled(config: RunConfig, num_finished: int, ended: threading.Event) -> list[tuple[int, int, bool]]:
    """What ran once all other positions were encoded, that many microbatches done, and the rank had asked for more.

    It waits as long as the run does, whose own limit ends a run in which nothing happens.
    """

    def wait(happened: Callable[[], bool]) -> None:
        while not happened():
            assert not ended.is_set(), f"{finished(config)} ran, {num_finished} microbatches should have"
            time.sleep(0.02)

    encoded = Path(config.runs_dir) / "encoded"
    wait(lambda: len(finished(config)) >= num_finished and len(encoded.read_text().split()) >= NUM_SAMPLES - 1)
    before = num_asked(config)
    wait(lambda: num_asked(config) >= before + NUM_IN_VAIN)
    return finished(config)


@pytest.mark.parametrize(
    ("order", "num_before"), [("arrival", 3), pytest.param("deterministic", 1, marks=pytest.mark.nightly)]
)
def test_a_held_back_position_holds_back_its_own_microbatch_only(
    tmp_path: Path, ray_cluster: None, order: str, num_before: int
) -> None:
    world = World()
    for _ in range(NUM_SAMPLES):
        world.add(1)
        world.rows[-1]["texts"] = [{"user": "what", "assistant": "red house " * 15}]  # equal ones: in position order
    config = tiny_config(
        tmp_path,
        world.write(tmp_path / "data.parquet"),
        f"barrier-{order}",
        "encoders.vision.max_batch_patches=4",  # one image a batch
        "scheduler.packing=best_fit",  # with zig-zag, slots of equal samples follow positions
        "scheduler.dispatch=zigzag",
        data={"shuffle": False, "order": order},
        training={"max_steps": 1},
    )
    Path(config.runs_dir).mkdir()
    seen: list[tuple[int, int, bool]] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def open_the_gate() -> None:
        try:
            seen.extend(wait_until_settled(config, num_before, ended))
        except BaseException as error:
            errors.append(error)
        finally:
            (Path(config.runs_dir) / "gate").touch()

    watcher = threading.Thread(target=open_the_gate)
    watcher.start()
    coordinator = type("RunCoordinator", (NotingCoordinator,), {"runs_dir": config.runs_dir})
    try:
        run_training(config, classes=ActorClasses(coordinator=coordinator, encoder=HoldingEncoder, backbone=NotingRank))
    finally:
        ended.set()
        watcher.join()
    assert not errors, errors

    ran = finished(config)
    num_slots = ran[0][1]
    held_slot = next(slot for slot, _, held in ran if held)
    assert num_slots >= 3 and held_slot < num_slots - 1, "the held microbatch must have others before or behind it"
    assert num_before == (num_slots - 1 if order == "arrival" else held_slot)
    assert sorted(slot for slot, _, _ in ran) == list(range(num_slots))
    if order == "arrival":
        assert {slot for slot, _, _ in seen} == set(range(num_slots)) - {held_slot}
        assert ran[-1][0] == held_slot
    else:
        assert [slot for slot, _, _ in seen] == list(range(held_slot))
        assert [slot for slot, _, _ in ran] == list(range(num_slots))
