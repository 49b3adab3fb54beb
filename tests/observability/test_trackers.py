"""TensorBoard for real; Weights & Biases and MLflow over stand-ins of their libraries; a class of the user's own."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from PIL import Image

from flowtrain.config.flow import ObservabilityConfig
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.observability.callback import Callback, deliver
from flowtrain.observability.stream import EventStream
from flowtrain.observability.trackers import registry
from flowtrain.observability.trackers.mlflow import MlflowTracker
from flowtrain.observability.trackers.registry import check_tracker_classes, check_trackers, make_trackers
from flowtrain.observability.trackers.scalars import step_scalars
from flowtrain.observability.trackers.tensorboard import TensorBoardTracker
from flowtrain.observability.trackers.wandb import WandbTracker
from flowtrain.types.metrics import PoolUse
from flowtrain.types.run_events import Noted, Restarted, RunEvent, RunStarted, StepFinished
from tests.disk import full_from
from tests.observability.events import CHECKPOINT, ENDED, EVALUATED, T0, started
from tests.training.ranks import make_config


class Calls(list[tuple[Any, ...]]):
    """Stands for an object whose calls are kept: (name, positional arguments, keyword arguments)."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.append((name, args, kwargs))

    def of(self, name: str) -> list[Any]:
        return [args for called, args, _ in self if called == name]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with the image that an evaluation names."""
    image = tmp_path / EVALUATED.generated[0].images[0]
    image.parent.mkdir(parents=True)
    Image.new("RGB", (5, 3), "red").save(image)
    return tmp_path


def whole_run(tracker: Callback, run: Path, make_metrics: Any, **changes: Any) -> None:
    step = make_metrics(2, source_losses={"cats": 0.75}, timestamp=T0, grad_norm=float("nan"))
    for event in (started(run, **changes), StepFinished(metrics=step), EVALUATED, CHECKPOINT, ENDED):
        deliver(tracker, event)


RESTARTED = Restarted(step=4, role="backbone", name="rank", reason="killed", down_s=1.5, steps_again=2)


def test_the_numbers_of_a_step_are_those_of_its_line(make_metrics: Any) -> None:
    metrics = make_metrics(
        3,
        loss=float("inf"),
        source_losses={"a": 1.0, "b": float("nan")},
        slot_imbalance=(0.1, 0.4),
        read_nbytes_by_transport={"nixl": 5},
        pool=(PoolUse("encoder", "0", "dram", 1, 2),),
    )
    scalars = step_scalars(metrics)
    assert scalars["source_losses/a"] == 1.0 and scalars["read_nbytes_by_transport/nixl"] == 5
    assert scalars["slot_imbalance"] == 0.4 and scalars["tokens_per_s"] == 2000.0
    for missing in (
        "loss",
        "source_losses/b",
        "step",
        "timestamp",
        "schema",
        "pool",
        "plan_digest",
        "mfu",
        "skipped",
        "spike",
    ):
        assert missing not in scalars
    assert "slot_imbalance" not in step_scalars(make_metrics(3))


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def board_of(directory: Path) -> list[Any]:
    """The events of all files in a directory: each record is a length, a checksum, the event, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for file in sorted(directory.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboardX", reason="pip install 'flowtrain[tensorboard]'")


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_gets_numbers_texts_and_pictures(run: Path, make_metrics: Any) -> None:
    whole_run(TensorBoardTracker(), run, make_metrics)
    found = {value.tag: (event, value) for event in board_of(run / "tensorboard") for value in event.summary.value}

    def number(tag: str) -> tuple[float, int, float]:
        event, value = found[tag]
        return value.simple_value, event.step, event.wall_time

    assert number("loss") == (0.5, 2, T0) and number("source_losses/cats") == (0.75, 2, T0)
    assert "grad_norm" not in found, "it is not finite"
    assert number("eval/held-out/loss") == (0.5, 2, T0) and number("checkpoint/nbytes") == (1000, 2, T0)
    assert found["loss"][0] is found["source_losses/cats"][0], "a step is one event"
    config, sample = (
        found[f"{tag}/text_summary"][1].tensor.string_val[0].decode() for tag in ("config", "eval/held-out/0")
    )
    assert '"name": "small"' in config
    assert all(line.startswith("    ") for line in sample.splitlines()), "a block of code: no Markdown, no HTML"
    assert "what is <b>this</b>?" in sample and "reference: a cat" in sample and "generated: a **dog**" in sample
    event, picture = found["eval/held-out/0/0"]
    assert (picture.image.height, picture.image.width, event.step) == (3, 5, 2)
    assert not any(event.HasField("session_log") for event in board_of(run / "tensorboard"))


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_forgets_what_a_resume_repeats(run: Path, make_metrics: Any) -> None:
    whole_run(TensorBoardTracker(str(run / "boards")), run, make_metrics, step=7, resumed_from=7)
    (again,) = [event for event in board_of(run / "boards") if event.HasField("session_log")]
    assert again.step == 8 and again.session_log.status == again.session_log.START


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize("steps_again", [0, 2])
def test_tensorboard_forgets_what_a_run_that_went_back_repeats(run: Path, make_metrics: Any, steps_again: int) -> None:
    board = TensorBoardTracker(str(run / "boards"))
    board.on_run_start(started(run))
    board.on_restart(replace(RESTARTED, steps_again=steps_again))
    events = board_of(run / "boards")
    again = [event.step for event in events if event.HasField("session_log")]
    assert again == ([5] if steps_again else [])
    told = {value.tag: value.simple_value for event in events if event.step == 4 for value in event.summary.value}
    assert told == {"restart/backbone/down_s": 1.5, "restart/backbone/steps_again": steps_again}


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize("waits", [False, True])
def test_tensorboard_waits_for_nothing_on_a_full_disk(
    run: Path, make_metrics: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr("flowtrain.observability.trackers.tensorboard.FLUSH_S", 1e9 if waits else 0.0)
    threads = set(threading.enumerate())
    tracker = TensorBoardTracker()
    tracker.on_run_start(started(run))
    with full_from(0), pytest.raises(OSError):
        tracker.on_step(StepFinished(metrics=make_metrics(1)))
        assert waits, "a step that is written at once"
        tracker.on_checkpoint(CHECKPOINT)
    assert set(threading.enumerate()) == threads, "nobody is left who waits for room on the disk"


# --- Weights & Biases ------------------------------------------------------------------------------------------------


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.runs: list[Calls] = []
        self.table = Calls()

    def init(self, **options: Any) -> Calls:
        self.inits.append(options)
        self.runs.append(Calls())
        return self.runs[-1]

    def Table(self, columns: list[str]) -> Calls:
        self.columns = columns
        return self.table

    def Image(self, path: str) -> str:
        return path


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_numbers_and_a_table(run: Path, make_metrics: Any, wandb: FakeWandb) -> None:
    whole_run(WandbTracker(project="cats", mode="offline"), run, make_metrics)
    (options,), (calls,) = wandb.inits, wandb.runs
    assert options["project"] == "cats" and options["mode"] == "offline" and options["name"] == "small"
    assert options["config"] == {"name": "small"} and options["dir"] == str(run)
    assert options["settings"] == {"console": "off"}
    logged = [args[0] for args in calls.of("log")]
    assert [values["step"] for values in logged] == [2, 2, 2]
    assert logged[0]["loss"] == 0.5 and logged[1]["eval/held-out/loss"] == 0.5
    assert logged[1]["eval/held-out/generated"] is wandb.table and logged[2]["checkpoint/duration_s"] == 0.25
    assert wandb.table.of("add_data") == [
        ("cats", 3, "what is <b>this</b>?", "a cat", "a **dog**", str(run / "generated/2/cat.png"))
    ]
    assert calls[-1] == ("finish", (), {"exit_code": 1}), "it was stopped"


def test_wandb_gets_what_a_restart_cost(run: Path, wandb: FakeWandb) -> None:
    tracker = WandbTracker()
    tracker.on_run_start(started(run))
    tracker.on_restart(RESTARTED)
    tracker.on_restart(replace(RESTARTED, role="encoder", down_s=None, steps_again=0))
    assert [args[0] for args in wandb.runs[0].of("log")] == [
        {"step": 4, "restart/backbone/down_s": 1.5, "restart/backbone/steps_again": 2},
        {"step": 4, "restart/encoder/steps_again": 0},
    ]


def test_wandb_goes_on_with_its_run_after_a_resume_and_only_then(
    run: Path, make_metrics: Any, wandb: FakeWandb
) -> None:
    for resumed_from in (None, 2, None):
        whole_run(WandbTracker(), run, make_metrics, resumed_from=resumed_from)
    first, resumed, again = (options["id"] for options in wandb.inits)
    assert first == resumed != again


# --- MLflow ----------------------------------------------------------------------------------------------------------


class FakeMlflow:
    """A server with its runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = Calls()
        self.experiments: dict[str, str] = {}
        self.num_runs = 0
        outer = self

        class Client:
            def __init__(self, tracking_uri: str | None) -> None:
                outer.calls.append(("MlflowClient", (tracking_uri,), {}))

            def __getattr__(self, name: str) -> Any:
                return getattr(outer.calls, name)

            def get_experiment_by_name(self, name: str) -> Any:
                found = outer.experiments.get(name)
                return None if found is None else SimpleNamespace(experiment_id=found)

            def create_experiment(self, name: str) -> str:
                return outer.experiments.setdefault(name, f"number of {name}")

            def create_run(self, experiment: str, run_name: str) -> Any:
                assert experiment in outer.experiments.values()
                outer.num_runs += 1
                return SimpleNamespace(info=SimpleNamespace(run_id=f"run-{outer.num_runs}"))

        metric = lambda key, value, timestamp, step: (key, value, timestamp, step)  # noqa: E731
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=metric))  # type: ignore[arg-type]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    return FakeMlflow(monkeypatch)


def test_mlflow_gets_numbers_and_files(run: Path, make_metrics: Any, mlflow: FakeMlflow) -> None:
    whole_run(MlflowTracker("http://server", experiment="cats"), run, make_metrics)
    assert mlflow.experiments == {"cats": "number of cats"}
    logged = [metric for _, _, kwargs in mlflow.calls if "metrics" in kwargs for metric in kwargs["metrics"]]
    assert ("loss", 0.5, int(T0 * 1000), 2) in logged and ("eval/held-out/loss", 0.5, int(T0 * 1000), 2) in logged
    (config, generated) = mlflow.calls.of("log_dict")
    assert config == ("run-1", {"name": "small"}, "config.json")
    assert generated[2] == "generated/00000002/held-out.json"
    assert json.loads(json.dumps(generated[1]))["samples"][0]["text"] == "a **dog**"
    assert mlflow.calls.of("log_artifact") == [("run-1", str(run / "generated/2/cat.png"), "generated/00000002")]
    assert mlflow.calls[-1] == ("set_terminated", ("run-1",), {"status": "KILLED"})


def test_mlflow_gets_what_a_restart_cost(run: Path, mlflow: FakeMlflow) -> None:
    tracker = MlflowTracker()
    tracker.on_run_start(started(run))
    tracker.on_restart(RESTARTED)
    logged = [metric for _, _, kwargs in mlflow.calls if "metrics" in kwargs for metric in kwargs["metrics"]]
    assert {(key, value, step) for key, value, _, step in logged} == {
        ("restart/backbone/down_s", 1.5, 4),
        ("restart/backbone/steps_again", 2, 4),
    }


def test_mlflow_goes_on_with_its_run_after_a_resume(run: Path, make_metrics: Any, mlflow: FakeMlflow) -> None:
    whole_run(MlflowTracker(), run, make_metrics)
    before = len(mlflow.calls)
    whole_run(MlflowTracker(), run, make_metrics, resumed_from=2)
    later = mlflow.calls[before:]
    assert mlflow.num_runs == 1 and ("update_run", ("run-1",), {"status": "RUNNING"}) in later
    assert not any(name == "log_param" for name, _, _ in later), "a parameter cannot change"


def test_a_name_that_mlflow_refuses_is_changed(run: Path, make_metrics: Any, mlflow: FakeMlflow) -> None:
    tracker = MlflowTracker()
    tracker.on_run_start(started(run))
    tracker.on_evaluation(replace(EVALUATED, name="käse (50%)", generated=()))
    keys = [metric[0] for _, _, kwargs in mlflow.calls if "metrics" in kwargs for metric in kwargs["metrics"]]
    assert keys == ["eval/käse _50__/loss", "eval/käse _50__/duration_s"]


# --- which run, and with what ----------------------------------------------------------------------------------------


class Mine(Callback):
    """A class of the user's own."""

    told: ClassVar[list[tuple[str, RunEvent]]] = []

    def __init__(self, mark: str = "") -> None:
        self._mark = mark

    def on_run_start(self, event: RunStarted) -> None:
        self.told.append((self._mark, event))


@pytest.fixture
def told() -> Iterator[list[tuple[str, RunEvent]]]:
    Mine.told.clear()
    yield Mine.told


def test_a_class_by_its_path_and_a_callback_of_the_caller_are_called(
    told: list[tuple[str, RunEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_module", SimpleNamespace(Mine=Mine))  # type: ignore[arg-type]
    settings = ObservabilityConfig(
        trackers=("users_module:Mine",), tracker_options={"users_module:Mine": {"mark": "configured"}}
    )
    stream = EventStream()
    stream.add_trackers(make_trackers(settings, [Mine("given")]))
    stream.emit(started())
    stream.close()
    assert sorted(mark for mark, _ in told) == ["configured", "given"]


def test_a_class_that_is_not_there_switches_its_tracker_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "users_module", SimpleNamespace())  # type: ignore[arg-type]
    told: list[RunEvent] = []
    stream = EventStream()
    stream.add(told.append)
    stream.add_trackers(make_trackers(ObservabilityConfig(trackers=("users_module:Mine",))))
    stream.emit(started())
    stream.close()
    warnings = [*caplog.messages, *(event.text for event in told if isinstance(event, Noted))]
    (warning,) = (text for text in warnings if text.startswith("tracker users_module:Mine is off"))
    assert "AttributeError" in warning


def test_a_library_or_module_that_is_not_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda module: module == "mlflow")
    check_trackers(ObservabilityConfig(trackers=("mlflow",)))
    with pytest.raises(
        ConfigError, match=r"names wandb, but .* no module wandb here; pip install 'flowtrain\[wandb\]'"
    ):
        check_trackers(ObservabilityConfig(trackers=("mlflow", "wandb")))
    with pytest.raises(ConfigError, match=r"no module my.board here; put its directory on PYTHONPATH"):
        check_trackers(ObservabilityConfig(trackers=("my.board:Board",)))


def test_modules_are_looked_for_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry._is_there("json.tool") and not registry._is_there("absent") and not registry._is_there("absent.too")
    package = tmp_path / "boards_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "board.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry._is_there("boards_of_mine.board") and not registry._is_there("boards_of_mine.other")
    assert not registry._is_there("boards_of_mine.board.deeper")
    monkeypatch.setitem(sys.modules, "without_a_spec", ModuleType("without_a_spec"))
    assert not registry._is_there("without_a_spec.board")


USERS_MODULE = """
import functools

class Board:
    def __init__(self, every, colour="red"): ...
    def on_step(self, event): ...

class Any(Board):
    def __init__(self, **options): ...

class Misspelt(Board):
    def on_run_edn(self, event): ...

class Deaf: ...

class Handed:
    def __init__(self, handler=print):
        self.on_step = handler

class Another:
    def __new__(cls):
        return Board(1)

class Silent:
    def __init__(self): ...

every_third = functools.partial(Board, every=3)

def make(): ...
"""
LAZY_MODULE = """
from json import JSONDecoder

def __dir__():
    return ["Board", "JSONDecoder", "Broken"]

def __getattr__(name):
    if name in ("Board", "Broken"):
        raise RuntimeError("an extra is missing")
    raise AttributeError(name)
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "boards_of_a_user.py").write_text(USERS_MODULE)
    (tmp_path / "broken_boards.py").write_text("import boards_of_a_user\n1 / 0\n")
    (tmp_path / "lazy_boards.py").write_text(LAZY_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("boards_of_a_user", "lazy_boards"):
        sys.modules.pop(name, None)


def with_tracker(name: str, options: dict[str, Any]) -> RunConfig:
    settings = ObservabilityConfig(trackers=(name,), tracker_options={name: options})
    return make_config().model_copy(update={"observability": settings})


@pytest.mark.usefixtures("users_module", "tensorboard")
@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        (
            "boards_of_a_user:Bord",
            {},
            r"observability.trackers.0 = 'boards_of_a_user:Bord': module boards_of_a_user has no Bord; "
            r"did you mean boards_of_a_user:Board\?",
        ),
        ("boards_of_a_user:xyz", {}, r"has no xyz; it has Another, Any, Board, Deaf, Handed, Misspelt, Silent"),
        ("boards_of_a_user:make", {}, r"make is no class but a function; name a class"),
        ("boards_of_a_user:Deaf", {}, r"the class has none of the methods that events call; .* on_run_start, on_step"),
        ("boards_of_a_user:Misspelt", {}, r"the class has a method on_run_edn, .* did you mean on_run_end\?"),
        (
            "broken_boards:Board",
            {},
            r"import of broken_boards fails; .* ZeroDivisionError.*broken_boards.py:2, in <mod",
        ),
        (
            "lazy_boards:Broken",
            {},
            r"import of lazy_boards fails; .* RuntimeError: an extra is missing .*lazy_boards.py",
        ),
        ("lazy_boards:Bord", {}, r"module lazy_boards has no Bord; did you mean lazy_boards:Board\?"),
        ("boards_of_a_user:every_third", {"evry": 1}, r"every_third.evry: unknown option; did you mean every\?"),
        (
            "boards_of_a_user:Board",
            {"evry": 10, "every": 1},
            r"tracker_options.boards_of_a_user:Board.evry: unknown option; did you mean every\?",
        ),
        ("boards_of_a_user:Board", {"colour": "blue"}, r"these options: missing a required argument: 'every'"),
        (
            "tensorboard",
            {"logdirr": "x"},
            r"tracker_options.tensorboard.logdirr: unknown option; did you mean logdir\?",
        ),
        ("tensorboard", {"zzz": "x"}, r"tracker_options.tensorboard.zzz: unknown option; it has logdir"),
    ],
)
def test_a_class_that_cannot_follow_the_run_is_refused(name: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        check_tracker_classes(with_tracker(name, options))
    assert str(caught.value).startswith("run 'test': ") and "blue" not in str(caught.value)


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("boards_of_a_user:Board", {"every": 10}),
        ("boards_of_a_user:Any", {"whatever": 1}),
        ("boards_of_a_user:every_third", {"colour": "blue"}),
        ("boards_of_a_user:Handed", {}),
        ("boards_of_a_user:Another", {}),
        ("boards_of_a_user:Silent", {}),  # its object is looked at once it is built
        ("mlflow", {"tracking_uri": "http://server", "experiment": "cats"}),
        ("wandb", {"whatever": 1}),  # its library knows
    ],
)
def test_a_class_that_takes_its_options_is_not_refused(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda module: True)
    check_tracker_classes(with_tracker(name, options))


@pytest.mark.usefixtures("users_module")
def test_an_object_without_methods_switches_its_tracker_off() -> None:
    stream = EventStream()
    names = ("boards_of_a_user:Silent", "boards_of_a_user:Handed", "boards_of_a_user:Another")
    stream.add_trackers(make_trackers(ObservabilityConfig(trackers=names)))
    stream.emit(started())
    stream.close()
    (off,) = stream.off
    assert off.startswith("boards_of_a_user:Silent was off from step ")
    assert "the object that Silent gives has none of the methods that events call" in off


def test_a_wrong_option_of_mlflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda module: True)
    with pytest.raises(ConfigError, match=r"tracker_options.mlflow.experimnt: .* did you mean experiment\?"):
        check_tracker_classes(with_tracker("mlflow", {"experimnt": "cats"}))


def test_without_a_name_nothing_runs() -> None:
    assert make_trackers(ObservabilityConfig()) == []
