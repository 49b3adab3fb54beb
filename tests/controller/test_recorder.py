"""The run's files as events make them, and how a resume cuts them back."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.run import RunConfig
from flowtrain.controller import audit as audit_module
from flowtrain.controller import step_meter
from flowtrain.controller.audit import AuditTrail
from flowtrain.controller.evaluations import Evaluations
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.state import Role
from flowtrain.controller.step_meter import pool_uses
from flowtrain.errors import RunFileError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.units import unit_sequence
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.stream import EventStream
from flowtrain.observability.trace import read_spans
from flowtrain.scheduler.cost import eq3
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.events import (
    CheckpointWritten,
    Event,
    LedgerRow,
    Rejected,
    Rejoined,
    SlowFound,
    SpansRecorded,
    UnitDone,
)
from flowtrain.types.memory import SegmentUse, Tier
from flowtrain.types.messages import RankReport, SampleLoss, Span
from flowtrain.types.metrics import PoolUse, StepMetrics
from flowtrain.types.plan import DevicePeak, Flops, Unit, UnitKind
from flowtrain.types.run_events import (
    ActorLost,
    EvaluationFinished,
    Noted,
    Quarantined,
    Restarted,
    RunEvent,
    StepFinished,
    StragglerFound,
)
from flowtrain.types.run_plan import Mode
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, RejectReason, SampleRef, SamplerState
from flowtrain.types.sources import SourceIndex
from tests.disk import full_from
from tests.training.ranks import make_config

BATCH, NUM_EVAL, EVAL_EVERY = 4, 3, 2
STEP_S = 2.0


def index_of(num_rows: int) -> SourceIndex:
    """Two files of one block each; the first has two rows."""
    two = np.zeros(2, np.int64)
    return SourceIndex(("one", "two"), np.arange(2, dtype=np.int32), two, two, two, np.array([0, 2, num_rows]))


def make_prepared(eval_every: int | None = EVAL_EVERY) -> RunSpec:
    evaluation = {"path": "unused", "every_steps": eval_every, "max_samples": NUM_EVAL} if eval_every else None
    sources = [{"path": "unused", "name": "cats"}, {"path": "unused", "name": "dogs"}]
    config: RunConfig = make_config(
        data={"sources": sources, "eval": evaluation},
        training={"global_batch_size": BATCH},
        encoders={"vision": {"path": "unused", "data_parallel_size": 2}},
    )
    return RunSpec(
        config=config,
        plan=fixed_plan(config),
        model_spec=None,  # type: ignore[arg-type]  # the recorder does not look at it
        source_names=("cats", "dogs"),
        indexes=(index_of(12), index_of(8), *([index_of(NUM_EVAL)] if eval_every else [])),
        evaluations=(EvalRounds(eval_every, NUM_EVAL),) if eval_every else (),
        num_steps=10,
        total_positions=None,
        cost=eq3(512),
        cost_profile=None,
    )


def train_unit(step: int) -> Unit:
    return Unit(step - 1 + (step - 1) // EVAL_EVERY, UnitKind.TRAIN, step, (step - 1) * BATCH, BATCH)


def eval_unit(step: int) -> Unit:
    first = EVAL_POSITION_BASE + (step // EVAL_EVERY - 1) * NUM_EVAL
    return Unit(train_unit(step).index + 1, UnitKind.EVAL, step, first, NUM_EVAL)


def done(unit: Unit, loss: float = 1.0, starved_s: tuple[float, ...] = (0.5, 1.5), **changes: Any) -> UnitDone:
    """Step k ends at k * STEP_S; an evaluation takes a further half of a second."""
    is_training = unit.kind is UnitKind.TRAIN
    finished_s = unit.step * STEP_S + (0.0 if is_training else 0.5)
    lr = 0.1 if is_training else None
    reports = tuple(
        RankReport(
            unit.index, unit.kind, unit.step, rank, loss, lr, lr, 4, 40, 8, finished_s - 1.0, finished_s, starved, 0.25
        )
        for rank, starved in enumerate(starved_s)
    )
    rows = tuple(
        LedgerRow(position, position % 2, position, 0, unit.step, 0 if k else -1, 1 if k else -1, "consumed")
        for k, position in enumerate(unit.positions)
    )
    values: dict[str, Any] = {
        "unit": unit,
        "reports": reports,
        "plan_digest": "0123456789abcdef",
        "plan_time_s": 0.01,
        "plan_wait_s": 0.0,
        "num_microbatches": 2,
        "packing_fill": 0.9,
        "dp_imbalance": 0.1,
        "flops": Flops(encoders=100.0, connector=50.0, backbone=450.0),
        "blocked_s": 0.5,
        "produced_samples": 6,
        "num_rejected": 1,
        "pool_dram_nbytes": 100,
        "pool_dram_bound_nbytes": 1000,
        "pool_hbm_nbytes": 50,
        "ledger": rows,
        "sampler_state": SamplerState(unit.positions[-1] + 1),
    }
    return UnitDone(**(values | changes))


def rejected(*positions: int, num_rejected: int = 1) -> Rejected:
    return Rejected(tuple(map(rejection_of, positions)), num_rejected, 8)


def rejection_of(position: int) -> Rejection:
    """An evaluation round takes the same rows as the one before."""
    is_evaluated = position >= EVAL_POSITION_BASE
    source, row = (2, (position - EVAL_POSITION_BASE) % NUM_EVAL) if is_evaluated else (0, position % 12)
    return Rejection(SampleRef(position, source, row, 0), RejectReason.EMPTY_ANSWER, "")


class World:
    """A run directory and the recorders that write into it, one after another."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.files = RunDir(root)
        self.told: list[RunEvent] = []

    def record(self, *events: Event, run_spec: RunSpec | None = None) -> Recorder:
        recorder = self.open(run_spec=run_spec)
        for event in events:
            recorder.take(event)
        return recorder

    def open(
        self, first_step: int = 0, run_spec: RunSpec | None = None, consumed: ConsumedPositions | None = None
    ) -> Recorder:
        """Open behind steps that ran in order, or that consumed something else."""
        run_spec, consumed = run_spec or make_prepared(), consumed or ConsumedPositions(first_step * BATCH)
        self.stream = EventStream(first_step)
        audit = AuditTrail(run_spec, self.files, first_step, consumed, self.stream.warn)
        self.stream.add(audit.take)
        self.stream.add(self.told.append)
        return Recorder(run_spec, audit, Evaluations(run_spec, self.files, first_step), self.stream, consumed)

    @property
    def shown(self) -> list[StepMetrics]:
        return [event.metrics for event in self.told if isinstance(event, StepFinished)]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.metrics.read_text().splitlines()]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics()]

    def ledger_steps(self) -> list[int]:
        return sorted({row["step"] for row in read_ledger(self.files.ledger).to_pylist()})

    def quarantined(self) -> list[int]:
        return [json.loads(line)["position"] for line in self.files.quarantine.read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "run")


@pytest.mark.parametrize(("mode", "num_devices"), [("disaggregated", 3), ("colocated", 1), ("monolithic", 1)])
def test_devices_are_counted_once(world: World, mode: Mode, num_devices: int) -> None:
    run_spec = make_prepared()
    plan = replace(run_spec.plan, mode=mode, encoders={} if mode == "monolithic" else run_spec.plan.encoders)
    world.record(done(train_unit(1)), run_spec=replace(run_spec, plan=plan))
    assert world.metrics()[0]["tokens_per_s_per_device"] == pytest.approx(40.0 / num_devices)


def test_a_step_becomes_a_line_with_its_figures(world: World) -> None:
    recorder = world.open()
    recorder.peak = DevicePeak("cpu", 100.0, "measured")
    recorder.take(done(train_unit(1), loss=3.0))
    (line,) = world.metrics()
    assert line["step"] == 1 and line["loss"] == 3.0 and line["epoch"] == BATCH / 20
    assert line["step_time_s"] == 1.0, "the first step is measured from its own start"
    assert line["starved_s"] == 1.0 and line["fetch_s"] == 0.25 and line["blocked_s"] == 0.5
    assert line["tokens_per_s"] == 40.0 and line["tokens_per_s_per_device"] == pytest.approx(40.0 / 3)
    assert line["mfu"] == pytest.approx(600.0 / 1.0 / (3 * 100.0)), "two encoders and one rank"
    assert line["backbone_mfu"] == pytest.approx(500.0 / 1.0 / 100.0), "connector and backbone over the rank alone"
    assert line["produced_samples_per_s"] == 6.0 and line["consumed_samples_per_s"] == 4.0
    assert line["rejected"] == 1 and line["eval_loss"] is None
    assert line["pool_dram_nbytes"] == 100 and line["pool_hbm_nbytes"] == 50
    assert [metrics.step for metrics in world.shown] == [1]
    assert recorder.last is not None and recorder.last.step == 1


def test_steps_are_timed_end_to_end_without_the_evaluation(world: World) -> None:
    world.record(*(done(unit) for unit in (train_unit(1), train_unit(2), eval_unit(2), train_unit(3))))
    assert [line["step_time_s"] for line in world.metrics()] == [1.0, STEP_S, STEP_S - 0.5]


def test_without_a_known_peak_there_is_no_mfu(world: World) -> None:
    world.record(done(train_unit(1)))
    assert world.metrics()[0]["mfu"] is None and world.metrics()[0]["backbone_mfu"] is None


def test_the_line_of_a_step_waits_for_its_evaluation(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2), loss=2.0))
    assert world.steps() == [1], "an evaluation follows step 2"
    recorder.take(done(eval_unit(2), loss=7.0))
    assert [(line["loss"], line["eval_loss"]) for line in world.metrics()] == [(1.0, None), (2.0, 7.0)]
    assert recorder.last_eval_loss == 7.0
    recorder.take(done(train_unit(3)))
    assert recorder.last is not None and recorder.last.eval_loss is None and recorder.last_eval_loss == 7.0


def test_a_line_without_its_evaluation_is_written_when_the_run_ends(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2)))
    recorder.close()
    recorder.close()
    assert [(line["step"], line["eval_loss"]) for line in world.metrics()] == [(1, None), (2, None)]


def test_a_checkpoint_finds_ledger_and_metrics_on_disk(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2)), done(eval_unit(2)), CheckpointWritten(2, "x"))
    assert not world.ledger_steps()
    recorder.flush(2)
    assert world.steps() == world.ledger_steps() == [1, 2]
    rows = read_ledger(world.files.ledger).to_pylist()
    assert [row["position"] for row in rows] == list(range(2 * BATCH)), "evaluation samples are not in the ledger"
    assert rows[0]["source"] == "cats" and rows[0]["dp_rank"] is None and rows[0]["microbatch"] is None
    assert rows[1]["source"] == "dogs" and rows[1]["dp_rank"] == 0 and rows[1]["microbatch"] == 1


def test_a_checkpoint_that_comes_late_leaves_a_later_line_to_its_evaluation(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2)), CheckpointWritten(1, "x"))
    recorder.flush(1)
    assert world.steps() == [1]
    recorder.take(done(eval_unit(2)))
    assert [line["eval_loss"] for line in world.metrics()] == [None, 1.0]


def test_sampler_states_are_kept_until_a_checkpoint_passes_them(world: World) -> None:
    recorder = world.record(*(done(train_unit(step)) for step in (1, 2, 3)))
    assert recorder.sampler_states[2] == SamplerState(2 * BATCH)
    recorder.forget_before(2)
    assert list(recorder.sampler_states) == [3]


def test_rows_do_not_pile_up_between_checkpoints(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_BUFFERED_ROWS", 2 * BATCH)
    recorder = world.record(*(done(train_unit(step)) for step in (1, 2, 3)))
    assert world.ledger_steps() == [1, 2]
    recorder.flush(2)
    assert world.ledger_steps() == [1, 2, 3]


def test_a_resume_cuts_everything_back_to_its_step(world: World) -> None:
    first = world.record(
        *(done(train_unit(step)) for step in (1, 2)),
        rejected(1),
        rejected(3 * BATCH, num_rejected=2),
        rejected(EVAL_POSITION_BASE + 1, num_rejected=2),
        rejected(EVAL_POSITION_BASE + NUM_EVAL, num_rejected=2),
        done(eval_unit(2)),
        done(train_unit(3)),
    )
    first.flush(99)
    first.close()
    second = world.open(first_step=2)
    assert world.steps() == world.ledger_steps() == [1, 2]
    assert world.quarantined() == [1, EVAL_POSITION_BASE + 1]
    assert second.num_rejected == 1 and second.num_seen == 2 * BATCH
    for event in (rejected(3 * BATCH, num_rejected=2), done(train_unit(3)), done(train_unit(4)), done(eval_unit(4))):
        second.take(event)
    second.flush(99)
    assert world.steps() == world.ledger_steps() == [1, 2, 3, 4]
    assert world.quarantined() == [1, EVAL_POSITION_BASE + 1, 3 * BATCH]


def test_going_back_in_a_run_cuts_everything_as_a_resume_does(world: World) -> None:
    recorder = world.open()
    for event in (done(train_unit(1)), done(train_unit(2)), done(eval_unit(2), loss=0.5), done(train_unit(3))):
        recorder.take(event)
    recorder.flush(3)
    recorder.take(rejected(5, 9, num_rejected=2))
    recorder.take(done(train_unit(4)))
    assert recorder.rewind(2, ConsumedPositions(2 * BATCH)) == 2, "step 4 still waited for its evaluation"
    assert world.steps() == [1, 2] and world.ledger_steps() == [1, 2] and world.quarantined() == [5]
    assert (recorder.num_rejected, recorder.num_seen) == (1, 2 * BATCH)
    assert set(recorder.sampler_states) == {1, 2}
    recorder.take(done(train_unit(3), loss=7.0))
    assert world.metrics()[-1]["step_time_s"] == 1.0, "it is measured from its own start again"
    assert [line["loss"] for line in world.metrics()] == [1.0, 1.0, 7.0]
    recorder.went_back("backbone-dp0-pp0-tp0", Role.BACKBONE, "killed", 2.5, 1)
    (told,) = [event for event in world.told if isinstance(event, Restarted)]
    assert (told.role, told.step, told.down_s, told.steps_again) == ("backbone", 3, 2.5, 1)
    assert told.timestamp <= time.time() - 2.5, "it is that of the loss"


def test_what_was_seen_before_a_resume_ends_with_the_data(world: World) -> None:
    assert world.open(2, consumed=ConsumedPositions(2 * BATCH - 1)).num_seen == 2 * BATCH - 1


def test_by_arrival_a_resume_keeps_of_the_quarantine_what_ran(world: World) -> None:
    """Step 1 took the positions 0, 2, 3 and 5, among which 2 and 5 were bad; 1 and 6 were found bad as well."""
    unit = replace(train_unit(1), chosen=(0, 2, 3, 5))
    first = world.record(*(rejected(position) for position in (5, 1, 2, 6)), done(unit))
    first.flush(99)
    first.close()
    assert world.metrics()[0]["epoch"] == BATCH / 20
    consumed = ConsumedPositions()
    consumed.add(unit.positions)
    second = world.open(1, consumed=consumed)
    assert world.quarantined() == [5, 2]
    assert second.num_rejected == 2 and second.num_seen == BATCH
    assert [row["position"] for row in read_ledger(world.files.ledger).to_pylist()] == [0, 2, 3, 5]


def test_a_bad_evaluation_sample_is_quarantined_once(world: World) -> None:
    first_round, second_round = EVAL_POSITION_BASE + 1, EVAL_POSITION_BASE + NUM_EVAL + 1
    recorder = world.record(rejected(first_round), rejected(1), rejected(second_round), rejected(5, num_rejected=2))
    assert world.quarantined() == [first_round, 1, 5]
    assert recorder.num_rejected == 2
    recorder.close()
    world.open(first_step=EVAL_EVERY).take(rejected(second_round))
    assert world.quarantined() == [first_round, 1, 5], "also behind a resume"


def test_a_line_of_the_quarantine_has_the_file_and_the_row_in_it(world: World) -> None:
    world.record(rejected(1, 5), rejected(EVAL_POSITION_BASE + 2))
    lines = [json.loads(line) for line in world.files.quarantine.read_text().splitlines()]
    assert [(line["source"], line["row"], line["file"], line["file_row"]) for line in lines] == [
        ("cats", 1, "one", 1),
        ("cats", 5, "two", 3),
        ("eval", 2, "two", 0),
    ]


def test_spans_go_into_the_trace(world: World) -> None:
    trace = RunTraces(world.files, num_done=0, num_steps=100)
    trace.take(SpansRecorded((Span("encoder-0", "encode", 1.0, 2.0),)))
    trace.close()
    assert [(span.actor, span.name) for span in read_spans(world.files.trace)] == [("encoder-0", "encode")]


def test_without_evaluation_no_line_is_held(world: World) -> None:
    world.record(*(done(train_unit(step)) for step in (1, 2)), run_spec=make_prepared(eval_every=None))
    assert world.steps() == [1, 2]


# --- a disk that is full ---------------------------------------------------------------------------------------------


def test_on_a_full_disk_steps_are_kept_and_written_later(world: World) -> None:
    recorder = world.record(done(train_unit(1)), run_spec=make_prepared(eval_every=None))
    trace = RunTraces(world.files, num_done=0, num_steps=100)
    recorder.flush(99)
    with full_from(100):
        for event in (done(train_unit(2)), rejected(5)):
            recorder.take(event)
        trace.take(SpansRecorded((Span("encoder-0", "encode", 1.0, 2.0),)))
        with pytest.raises(RunFileError, match=r"ledger.parquet cannot be written: File too large; \d+ bytes wait"):
            recorder.flush(99)
        recorder.take(done(train_unit(3)))
        assert world.steps() == world.ledger_steps() == [1], "no line is torn"
    assert [metrics.step for metrics in world.shown] == [1, 2, 3], "what shows the run goes on"
    recorder.take(done(train_unit(4)))
    recorder.flush(99)
    assert world.steps() == world.ledger_steps() == [1, 2, 3, 4] and world.quarantined() == [5]
    trace.take(SpansRecorded((Span("encoder-0", "encode", 3.0, 4.0),)))
    assert read_spans(world.files.trace) == [], "the trace is off"
    trace.close()
    recorder.close()


def test_what_waits_for_the_disk_has_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.observability.metrics.MAX_WAITING_NBYTES", 1500)
    recorder = world.open(run_spec=make_prepared(eval_every=None))
    with full_from(0), pytest.raises(RunFileError, match=r"metrics.jsonl cannot be written.* bytes are free"):
        for step in range(1, 5):
            recorder.take(done(train_unit(step)))
    with full_from(0):
        recorder.close()


def test_closing_says_what_is_lost_and_raises_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    recorder = world.open()
    with full_from(0):
        for event in (done(train_unit(1)), done(train_unit(2))):  # the second waits for its evaluation
            recorder.take(event)
        recorder.close()
    assert "metrics.jsonl lacks its last lines" in caplog.text


def test_the_samples_of_a_step_without_an_update_are_listed_until_a_resume_does_it_again(world: World) -> None:
    def with_reports(step: int, **changes: Any) -> UnitDone:
        event = done(train_unit(step))
        return replace(event, reports=tuple([replace(each, **changes) for each in event.reports]))

    losses = (SampleLoss(BATCH, 10.0, 4), SampleLoss(BATCH + 1, float("nan"), 1))
    recorder = world.record(
        with_reports(1),
        with_reports(2, loss=float("nan"), sample_losses=losses),
        with_reports(3, is_spike=True),
    )
    recorder.flush(3)
    lines = [json.loads(line) for line in world.files.skipped.read_text().splitlines()]
    assert [line["position"] for line in lines] == list(range(BATCH, 3 * BATCH))
    assert {line["step"]: line["reason"] for line in lines} == {2: "not finite", 3: "spike"}
    assert [(line["loss"], line["is_finite"]) for line in lines[:3]] == [(2.5, True), (None, False), (None, None)]
    assert (lines[1]["source"], lines[1]["row"], lines[1]["dp_rank"]) == ("dogs", BATCH + 1, 0)
    assert [line["spike"] for line in world.metrics()] == [False, False, True]
    assert recorder.num_skipped == 2
    recorder.close()
    world.open(2)
    assert {json.loads(line)["step"] for line in world.files.skipped.read_text().splitlines()} == {2}


def test_a_straggler_is_an_event_and_a_warning(world: World) -> None:
    world.record(done(train_unit(1)), SlowFound("encoder-3", 2.25, 8))
    event, note = world.told[-2:]
    assert isinstance(event, StragglerFound) and isinstance(note, Noted)
    assert (event.role, event.name, event.ratio, event.num_workers, event.step) == ("encoder", "encoder-3", 2.25, 8, 1)
    assert note.level == "warning" and "encoder-3 is a straggler: it takes 2.2 times as long" in note.text


def test_steps_that_were_skipped_are_counted_over_a_resume(world: World) -> None:
    def skipped(step: int, **changes: Any) -> UnitDone:
        event = done(train_unit(step))
        return replace(event, reports=tuple(replace(report, **changes) for report in event.reports))

    spec = make_prepared(eval_every=None)
    first = world.record(
        skipped(1, loss=float("nan")),
        done(train_unit(2)),
        skipped(3, grad_norm=float("inf"), rewound_to=2),
        run_spec=spec,
    )
    first.flush(99)
    first.close()
    lines = world.metrics()
    assert [(line["skipped"], line["skipped_steps"]) for line in lines] == [(True, 1), (False, 1), (True, 2)]
    assert [line["rewound_to"] for line in lines] == [None, None, 2]
    assert lines[0]["loss"] is None and lines[2]["grad_norm"] is None
    assert world.open(2, run_spec=spec).num_skipped == 1


# --- what the run tells --------------------------------------------------------------------------------------------


def test_an_evaluation_is_told_after_its_step(world: World) -> None:
    world.record(done(train_unit(1)), done(train_unit(2)), done(eval_unit(2), loss=7.0))
    step, evaluation = world.told[-2:]
    assert isinstance(step, StepFinished) and step.step == 2 and step.metrics.eval_loss == 7.0
    assert isinstance(evaluation, EvaluationFinished)
    assert (evaluation.step, evaluation.name, evaluation.loss) == (2, "eval", 7.0)
    assert (evaluation.num_samples, evaluation.num_target_tokens, evaluation.duration_s) == (4, 8, 0.5)


TWO_SETS = (EvalRounds(EVAL_EVERY, NUM_EVAL), EvalRounds(EVAL_EVERY, 2))


def two_sets() -> RunSpec:
    """Held-out sets ``near`` and ``far``."""
    held_out = {"path": "unused", "every_steps": EVAL_EVERY}
    spec = make_prepared()
    config = make_config(data={"sources": [{"path": "unused"}], "eval": {"near": held_out, "far": held_out}})
    config = spec.config.model_copy(update={"data": spec.config.data.model_copy(update={"eval": config.data.eval})})
    return replace(spec, config=config, evaluations=TWO_SETS, indexes=(*spec.indexes, index_of(2)))


def eval_units(step: int) -> list[Unit]:
    return [unit for unit in unit_sequence(step, BATCH, None, TWO_SETS, step - 1) if unit.kind is UnitKind.EVAL]


def of_targets(unit: Unit, loss: float, num_target_tokens: int) -> UnitDone:
    event = done(unit, loss=loss)
    return replace(event, reports=tuple(replace(each, num_target_tokens=num_target_tokens) for each in event.reports))


def test_a_step_waits_for_all_its_held_out_sets(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2)), run_spec=two_sets())
    near, far = eval_units(2)
    recorder.take(of_targets(near, 2.0, 30))
    assert world.steps() == [1] and len(world.told) == 1, "another set follows"
    recorder.take(of_targets(far, 4.0, 10))
    line = world.metrics()[-1]
    assert line["eval_losses"] == {"near": 2.0, "far": 4.0} and line["eval_loss"] == 2.5, "by target tokens"
    assert recorder.last_eval_loss == 2.5
    assert recorder.eval_metrics(2) == {"eval_loss": 2.5, "eval_loss/near": 2.0, "eval_loss/far": 4.0}
    step, *evaluated = world.told[1:]
    assert isinstance(step, StepFinished) and step.metrics.eval_losses == {"near": 2.0, "far": 4.0}
    assert [(each.step, each.name, each.loss) for each in evaluated if isinstance(each, EvaluationFinished)] == [
        (2, "near", 2.0),
        (2, "far", 4.0),
    ]
    recorder.forget_before(2)
    assert recorder.eval_metrics(2) == {}


def test_rejected_rows_of_several_held_out_sets_are_told_apart(world: World) -> None:
    def bad(unit: Unit, source: int) -> Rejected:
        ref = SampleRef(unit.first_position + 1, source, 1, 0)
        return Rejected((Rejection(ref, RejectReason.EMPTY_ANSWER, ""),), 0, 8)

    spec = two_sets()
    units = [*eval_units(2), *eval_units(4)]
    recorder = world.record(*(bad(unit, 2 + unit.eval_set) for unit in units), run_spec=spec)
    recorder.close()
    lines = [json.loads(line) for line in world.files.quarantine.read_text().splitlines()]
    assert [(line["source"], line["row"]) for line in lines] == [("eval/near", 1), ("eval/far", 1)]
    world.open(EVAL_EVERY, run_spec=spec).take(bad(units[3], 3))
    assert len(world.quarantined()) == 2, "both are known after a resume"
    world.open(0, run_spec=spec)
    assert world.quarantined() == []


def test_a_rejection_is_told_once_with_the_name_of_its_source(world: World) -> None:
    first, again = EVAL_POSITION_BASE + 1, EVAL_POSITION_BASE + NUM_EVAL + 1
    world.record(done(train_unit(1)), rejected(5, num_rejected=3), rejected(first), rejected(again))
    told = [event for event in world.told if isinstance(event, Quarantined)]
    assert [(event.step, event.num_rejected, event.position, event.source, event.row) for event in told] == [
        (1, 3, 5, "cats", 5),
        (1, 1, first, "eval", 1),
    ]
    assert {event.reason for event in told} == {"empty_answer"}


def test_restarts_retries_and_bytes_count_for_the_step_in_which_they_were_also_in_evaluations(world: World) -> None:
    recorder = world.record(done(train_unit(1), retries=1, read_by_transport={"local": 5}))
    recorder.restarted("encoder-1", Role.ENCODER, "killed")
    counted = {"retries": 2, "read_by_transport": {"local": 1, "nixl": 2}}
    for unit in (train_unit(2), eval_unit(2), train_unit(3)):
        recorder.take(done(unit, **counted))
    recorder.take(done(train_unit(4)))
    recorder.close()
    lines = world.metrics()
    assert [line["restarts"] for line in lines] == [0, 1, 0, 0]
    assert [line["retries"] for line in lines] == [1, 2, 4, 0]
    assert [line["read_nbytes_by_transport"] for line in lines] == [
        {"local": 5},
        {"local": 1, "nixl": 2},
        {"local": 2, "nixl": 4},
        {},
    ]
    (restart,) = (event for event in world.told if isinstance(event, Restarted))
    assert (restart.step, restart.role, restart.name, restart.reason) == (1, "encoder", "encoder-1", "killed")


def test_a_step_has_the_losses_of_its_sources_and_the_state_of_flow_and_pool(world: World) -> None:
    segments = (SegmentUse("feeder-0", Tier.DRAM, 3, 9), SegmentUse("encoder-10", Tier.HBM, 1, 4))
    changes: dict[str, Any] = {"source_losses": {1: 0.5}, "slot_imbalance": (0.0, 0.25), "lookahead": 2}
    world.record(done(train_unit(1), pool=segments, **changes))
    (line,) = world.metrics()
    assert line["source_losses"] == {"dogs": 0.5}
    assert line["slot_imbalance"] == [0.0, 0.25] and line["lookahead_steps"] == 2
    assert line["pool"] == [
        {"role": "encoder", "rank": "10", "tier": "hbm", "used_nbytes": 1, "bound_nbytes": 4},
        {"role": "feeder", "rank": "0", "tier": "dram", "used_nbytes": 3, "bound_nbytes": 9},
    ]


def test_the_loss_of_the_only_source_is_that_of_the_step(world: World) -> None:
    run_spec = replace(make_prepared(), source_names=("cats",))
    world.record(done(train_unit(1), loss=3.0, ledger=()), run_spec=run_spec)
    assert world.metrics()[0]["source_losses"] == {"cats": 3.0}


def test_many_segments_are_summed_by_role_and_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [SegmentUse(f"encoder-{index}", Tier.DRAM, index, 10) for index in range(11)]
    assert [use.rank for use in pool_uses(segments)] == [str(index) for index in range(11)]
    monkeypatch.setattr(step_meter, "MAX_SHOWN_SEGMENTS", 10)
    assert pool_uses(segments) == (PoolUse("encoder", None, "dram", 55, 110),)


def test_going_back_to_a_checkpoint_is_told_after_the_step(world: World) -> None:
    event = done(train_unit(1))
    rewound = replace(event, reports=tuple(replace(report, rewound_to=0) for report in event.reports))
    world.record(rewound)
    step, note = world.told
    assert isinstance(step, StepFinished) and isinstance(note, Noted)
    assert note.level == "warning" and "went back to the checkpoint of step 0" in note.text


def test_a_loss_is_told_at_once(world: World) -> None:
    recorder = world.record(done(train_unit(1)))
    recorder.lost("encoder-1", Role.ENCODER, "it has not answered", 9.0)
    told = world.told[-1]
    assert isinstance(told, ActorLost)
    assert (told.step, told.role, told.name, told.reason, told.hung_s) == (
        *(1, "encoder", "encoder-1"),
        *("it has not answered", 9.0),
    )


def test_a_restart_is_told_once_the_actor_works_again_or_at_the_end(world: World) -> None:
    recorder = world.record(done(train_unit(1)))
    recorder.restarted("encoder-1", Role.ENCODER, "killed")
    recorder.take(Rejoined("encoder-0", 1.0))  # no death of it is known
    assert not any(isinstance(event, Restarted) for event in world.told)
    recorder.take(Rejoined("encoder-1", 2.5))
    assert isinstance(world.told[-1], Noted) and world.told[-1].text == "encoder-1 works again after 2.5 s"
    recorder.restarted("encoder-1", Role.ENCODER, "killed again")
    recorder.restarted("encoder-1", Role.ENCODER, "before it worked")
    recorder.restarted("feeder-0", Role.FEEDER, "lost")
    recorder.close()
    told = [(event.name, event.reason, event.down_s) for event in world.told if isinstance(event, Restarted)]
    assert told == [
        ("encoder-1", "killed", 2.5),
        ("encoder-1", "killed again", None),
        ("encoder-1", "before it worked", None),
        ("feeder-0", "lost", None),
    ]


def test_an_evaluation_that_comes_after_its_step_was_told_is_told_too(world: World) -> None:
    recorder = world.record(done(train_unit(1)), done(train_unit(2)))
    recorder.flush(2)
    recorder.take(done(eval_unit(2), loss=7.0))
    assert isinstance(world.told[-1], EvaluationFinished) and world.told[-1].loss == 7.0
    assert world.steps() == [1, 2]
