"""The startup benchmark's emulated actors run units as real ones do, and its handles name the actors of a process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import _startup_host
import pytest
from _positions import sample_of
from _startup_host import RECORDS, EmulatedEncoder, EmulatedFeeder, EmulatedRank
from _startup_nodes import Cluster, EmulatedNodes, EmulatedProcess
from _startup_run import ROOT, Shape, _read
from startup import SHAPES

from flowtrain.config.load import load_config
from flowtrain.controller.actor_specs import actor_specs_of
from flowtrain.controller.prepare import RunSpec, first_flow_settings, prepare
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.events import UnitDone
from flowtrain.types.plan import Unit, UnitKind
from tests.actors.local import Background, local_coordinator

SHAPE = Shape(dp=2, tp=2, num_encoders=2, num_feeders=2, num_nodes=2, num_processes=1, batch_size=32, num_steps=3)


@pytest.fixture(scope="module")
def run_spec() -> RunSpec:
    return prepare(load_config(ROOT / "configs" / "quickstart.yaml", SHAPE.overrides))


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    monkeypatch.setattr(_startup_host, "STEP_S", 0.01)
    monkeypatch.setattr(_startup_host, "ENCODE_S", 0.0)
    yield tmp_path


def test_an_emulated_run_consumes_every_position(run_spec: RunSpec, records: Path) -> None:
    config, degrees = run_spec.config, run_spec.plan.backbone.degrees
    settings = first_flow_settings(run_spec)
    with local_coordinator(lambda: build_flow(config, run_spec.model_spec, settings)) as link:
        actors: list[Any] = [EmulatedFeeder(config, "run", (), feeder, 2) for feeder in range(2)]
        actors += [EmulatedEncoder(config, "vision", f"encoder-{number}", "run") for number in range(2)]
        running = [Background(actor.run, link) for actor in actors]
        ranks = [EmulatedRank(config, rank, degrees, f"backbone-{rank}", 3, "run") for rank in range(4)]
        running += [Background(rank.run, link, 0, 0, "unused") for rank in ranks]
        for actor in running:
            actor.join()
        link.ask(CoordinatorApi.end_events)
        done = [event for event in link.ask(CoordinatorApi.events) if isinstance(event, UnitDone)]
    assert [row.position for event in done for row in event.ledger] == list(range(3 * 32))
    assert sorted(record["dp_rank"] for record in _read(records, "first-microbatch")) == [0, 1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_has_the_microbatches_that_the_figures_name(run_spec: RunSpec, name: str) -> None:
    shape = SHAPES[name]
    config = load_config(ROOT / "configs" / "quickstart.yaml", shape.overrides)
    unit = Unit(0, UnitKind.TRAIN, 1, 0, shape.batch_size)
    samples = [sample_of(position) for position in unit.positions]
    plan = StepPlanner.from_config(config, shape.dp, run_spec.cost).plan(unit, samples)
    assert (plan.num_slots, plan.num_samples, len(plan.encode_batches)) == (shape.slots, 1024, shape.num_encoders)
    assert shape.num_ranks == 256 and shape.num_nodes == 32


class FakeProcess:
    """Stands for the Ray actor of a process."""

    def __init__(self) -> None:
        self.process = EmulatedProcess()

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *args: getattr(self.process, method)(*args))})


def test_handles_name_the_actors_of_a_process(run_spec: RunSpec) -> None:
    nodes = EmulatedNodes(Cluster(SHAPE.num_nodes, 1, SHAPE.num_ranks, SHAPE.num_actors))
    nodes._processes[0] = FakeProcess()  # type: ignore[assignment]  # without Ray
    degrees, config = run_spec.plan.backbone.degrees, run_spec.config
    specs = [spec for spec in actor_specs_of(run_spec.plan) if spec.name.startswith("backbone")]
    handles: list[Any] = [
        nodes.spawn(EmulatedRank, {"name": spec.name}, config, spec.index, degrees, spec.name, 3, "run")
        for spec in specs
    ]
    addresses = [handle.node_address.remote() for handle in handles]
    assert addresses == ["10.64.0.1"] * 2 + ["10.64.0.2"] * 2, "two ranks a node"
    assert handles[3].start.remote("host", 1, None, None, None).peak.device == "emulated"
    actor = nodes._processes[0].process._actors[specs[3].name]  # type: ignore[attr-defined]
    assert isinstance(actor, Future) and actor.result()[1] == 1
