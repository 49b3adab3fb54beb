"""A run of one rank through coordinator, feeder and encoder as threads: two held-out sets, answers, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.feeder import Feeder
from flowtrain.config.run import RunConfig
from flowtrain.controller.evaluations import Evaluations
from flowtrain.controller.prepare import first_flow_settings, prepare
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.observability.run_dir import RunDir
from flowtrain.training.checkpoint_store import probe_directory
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.events import CheckpointWritten, Event, UnitDone
from flowtrain.types.plan import Degrees, StateOrigin, UnitKind
from tests.actors.local import Background, local_coordinator
from tests.actors.scripted import new_run_id
from tests.e2e.worlds import World, tiny_config

NUM_STEPS, BATCH, EVERY = 4, 4, 2


def config_of(directory: Path, name: str, **held_out: int) -> RunConfig:
    training, seen, text = World(seed=1), World(seed=2), World(seed=3)
    training.add_mixed(NUM_STEPS * BATCH)
    seen.add_mixed(3)
    text.add(0)
    paths = {
        each: str(world.write(directory / f"{each}.parquet"))
        for each, world in (("train", training), ("seen", seen), ("text", text))
    }
    return tiny_config(
        directory,
        Path(paths["train"]),
        name,
        data={
            "shuffle": False,
            "eval": {each: {"path": paths[each], "every_steps": EVERY, **held_out} for each in ("seen", "text")},
        },
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS},
        checkpoint={"every_steps": EVERY, "background": False, "at_end": False},
    )


def run(config: RunConfig, directory: Path) -> list[Event]:
    """Run all steps; returns what the driver gets."""
    spec, run_id = prepare(config), new_run_id()
    probe_directory(directory, run_id).mkdir(parents=True)
    settings = replace(first_flow_settings(spec), last_traced_step=NUM_STEPS)
    with local_coordinator(lambda: build_flow(config, spec.model_spec, settings)) as link:
        segment_nbytes = spec.plan.feeder.segment_nbytes
        producers = [Background(Feeder(config, run_id, spec.indexes, 0, 1, segment_nbytes).run, link)]
        producers += [Background(Encoder(config, "vision", "encoder-0", run_id).run, link)]
        rank = BackboneRank(config, 0, Degrees(), "backbone-dp0-pp0-tp0", spec.num_steps, run_id)
        rank.start(LOOPBACK, 0, StateOrigin(), spec.evaluations, None)
        rank.run(link, 0, 0, str(directory), run_id, last_traced_step=NUM_STEPS)
        for producer in producers:
            producer.join()
        return list(link.ask(CoordinatorApi.events))


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Event]]:
    """Of a run that answers samples and of one that does not."""
    directory = tmp_path_factory.mktemp("evaluated")
    answers = {"num_generated": 2, "max_new_tokens": 3}
    return {
        name: run(config_of(directory, name, **held_out), directory / name)
        for name, held_out in (("answers", answers), ("plain", {}))
    }


def units(events: list[Event]) -> list[UnitDone]:
    return [event for event in events if isinstance(event, UnitDone)]


def test_sets_are_evaluated_in_turn_and_answered_and_a_checkpoint_waits_for_them(
    events: dict[str, list[Event]],
) -> None:
    found = [
        event.step if isinstance(event, CheckpointWritten) else (event.unit.kind.value, event.unit.eval_set)
        for event in events["answers"]
        if isinstance(event, UnitDone | CheckpointWritten)
    ]
    step, seen, text = ("train", 0), ("eval", 0), ("eval", 1)
    assert found == [step, step, seen, text, 2, step, step, seen, text, 4]
    for event in units(events["answers"]):
        (report,) = event.reports
        counts = {(UnitKind.EVAL, 0): 2, (UnitKind.EVAL, 1): 1}
        expected = counts.get((event.unit.kind, event.unit.eval_set), 0)
        assert [answer.position - event.unit.first_position for answer in report.generated] == list(range(expected))
        assert all(1 <= answer.num_tokens <= 3 for answer in report.generated)


def test_answers_change_nothing_else(events: dict[str, list[Event]]) -> None:
    for event, plain in zip(units(events["answers"]), units(events["plain"]), strict=True):
        assert (event.unit, event.plan_digest, event.ledger) == (plain.unit, plain.plan_digest, plain.ledger)
        (report,), (other,) = event.reports, plain.reports
        assert (report.loss, report.grad_norm, report.num_target_tokens) == (
            *(other.loss, other.grad_norm, other.num_target_tokens),
        )


def test_the_driver_takes_what_the_rank_reports(events: dict[str, list[Event]], tmp_path: Path) -> None:
    spec = prepare(config_of(tmp_path, "driver", num_generated=2))
    (tmp_path / "run").mkdir()
    evaluations = Evaluations(spec, RunDir(tmp_path / "run"), 0)
    rounds = [event for event in units(events["answers"]) if event.unit.kind is UnitKind.EVAL]
    told = [evaluations.take(event, 0.0) for event in rounds]
    assert [(event.step, event.name, len(event.generated)) for event in told] == [
        *((2, "seen", 2), (2, "text", 1)),
        *((4, "seen", 2), (4, "text", 1)),
    ]
    assert all(sample.prompt and sample.reference for event in told for sample in event.generated)
    assert set(evaluations.of_step(4).as_metrics()) == {"eval_loss", "eval_loss/seen", "eval_loss/text"}
