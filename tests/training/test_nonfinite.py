"""Steps that are not finite: what the policy decides, and what a trainer's weights, optimizer and checkpoints do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import NonFiniteError
from flowtrain.pipeline.executor import execute
from flowtrain.training import checkpoint_store
from flowtrain.training import health as health_module
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.health import TrainingHealth, Verdict
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.nonfinite import MAX_REWINDS, NonFinitePolicy, Reaction
from flowtrain.training.spikes import LEAST_STEPS
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import CPU, TinyFamily, make_batch, make_config, make_plan

Mode = Literal["skip", "stop", "rewind"]

# --- the policy ------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.booleans(), max_size=40), limit=st.integers(0, 5))
def test_skip_stops_exactly_after_the_limit_in_a_row(steps: list[bool], limit: int) -> None:
    policy = NonFinitePolicy("skip", limit)
    in_a_row = 0
    for is_finite in steps:
        in_a_row = 0 if is_finite else in_a_row + 1
        assert policy.after_step(is_finite) is (Reaction.STOP if in_a_row > limit else Reaction.GO_ON)


def test_stop_stops_at_the_first() -> None:
    policy = NonFinitePolicy("stop", 5)
    assert [policy.after_step(is_finite) for is_finite in (True, False)] == [Reaction.GO_ON, Reaction.STOP]


def test_rewind_counts_anew_and_needs_a_finite_step_before_the_next() -> None:
    policy = NonFinitePolicy("rewind", 1)
    assert [policy.after_step(False) for _ in range(2)] == [Reaction.GO_ON, Reaction.REWIND]
    assert policy.may_rewind_to(4)
    assert [policy.after_step(is_finite) for is_finite in (False, True, False, False)][-1] is Reaction.REWIND
    assert policy.may_rewind_to(4)
    assert [policy.after_step(False) for _ in range(2)] == [Reaction.GO_ON, Reaction.STOP]


def test_a_rewind_needs_a_checkpoint_and_does_not_go_to_the_same_one_for_ever() -> None:
    policy = NonFinitePolicy("rewind", 0)
    assert not policy.may_rewind_to(None)
    assert [policy.may_rewind_to(4) for _ in range(MAX_REWINDS + 1)] == [True] * MAX_REWINDS + [False]
    assert policy.may_rewind_to(8)


# --- a trainer -------------------------------------------------------------------------------------------------------


class World:
    """One rank that trains a step at a time, and spoils gradients, loss or weights where a test says so."""

    def __init__(
        self, group: BackboneGroup, root: Path, mode: Mode = "skip", limit: int = 10, on_spike: str = "off"
    ) -> None:
        training = {"on_nonfinite": mode, "on_spike": on_spike, "max_skipped_steps": limit, "learning_rate": 1e-3}
        config = make_config(training=training)
        self.spoil: str | None = None
        self.root, self.saved, self.step = root, 0, 0
        self.trainer = Trainer(config, TinyFamily(), group, num_steps=50, before_optimizer=self._before_optimizer)
        self.health = TrainingHealth(config.training, self.trainer, root, lambda: self.saved)
        self._config = config

    def _before_optimizer(self, model: ModelChunks) -> None:
        if self.spoil == "gradient":
            _, parameter = next(iter(model.named_parameters()))
            parameter.grad.to_local().view(-1)[0] = float("inf")

    def run(self, spoil: str | None = None) -> Verdict:
        """Train one step."""
        self.spoil, self.step = spoil, self.step + 1
        batch = make_batch((self.step, self.step + 1), self._config)
        actions = self.trainer.begin_unit(make_plan((((self.step, self.step + 1),),), self.step))
        execute(actions, self.trainer.stages, lambda index: batch)
        if spoil == "loss":
            self.trainer._loss_sums[0] = torch.tensor(float("nan"))
        if spoil == "spike":
            self.trainer._loss_sums[0] = self.trainer._loss_sums[0] * 100
        result = self.trainer.finish_unit()
        if spoil == "weights":
            next(iter(self.weights.values())).view(-1)[0] = float("inf")
        return self.health.after_step(self.step, result)

    def save(self) -> bool:
        """Write and complete a checkpoint, as ranks and driver do, if that is allowed."""
        if not self.health.may_save(self.step):
            return False
        directory = checkpoint_store.temporary_directory(self.root, self.step, "x")
        self.trainer.save_checkpoint(directory)
        meta = checkpoint_store.CheckpointMeta(self.step, {}, "digest", 1, 1, "torch")
        checkpoint_store.commit(directory, meta, keep=2)
        self.saved = self.step
        return True

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().to_local() for name, each in self.trainer.model.named_parameters()}

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of weights and optimizer state."""
        names = {each: name for name, each in self.trainer.model.named_parameters()}
        optimizer: dict[str, Any] = {
            f"{names[each]}.{key}": value.to_local() if hasattr(value, "to_local") else value
            for each, values in self.trainer.optimizer.state.items()
            for key, value in values.items()
        }
        return {key: value.clone() for key, value in (self.weights | optimizer).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    group = init_backbone_group(0, Degrees(), CPU)
    (tmp_path / "checkpoints").mkdir()
    yield lambda *args: World(group, tmp_path / "checkpoints", *args)
    group.close()


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_applied_and_waits_with_the_checkpoint(
    make_world: MakeWorld, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    assert world.run() == Verdict() and world.save()
    before = world.state()
    assert world.run(spoil) == Verdict() and same(world.state(), before)
    assert not world.save() and not world.save() and "no checkpoint of step 2" in caplog.text
    assert world.run() == Verdict() and not same(world.state(), before)
    assert world.save()
    assert sorted(path.name for path in world.root.iterdir()) == ["step-00000001", "step-00000003"]


def test_too_many_in_a_row_end_the_run_with_everything_that_a_user_needs(make_world: MakeWorld) -> None:
    world = make_world("skip", 2)
    world.run()
    world.save()
    errors = [world.run("gradient").error for _ in range(3)]
    assert errors[:2] == [None, None] and isinstance(errors[2], NonFiniteError)
    for part in ("step 4", "3 in a row", "gradients inf", "learning rate 0.001", "max_skipped_steps is 2"):
        assert part in str(errors[2])
    assert str(world.root / "step-00000001") in str(errors[2]) and "--resume" in str(errors[2])


def test_stop_ends_at_the_first(make_world: MakeWorld) -> None:
    error = make_world("stop").run("loss").error
    assert error is not None and "there is no checkpoint to go back to" in str(error)


def test_a_rewind_restores_weights_and_optimizer_in_place_and_goes_on(make_world: MakeWorld) -> None:
    world = make_world("rewind", 1)
    world.run()
    world.save()
    saved = world.state()
    world.run()
    assert not same(world.state(), saved)
    assert world.run("gradient") == Verdict()
    assert world.run("gradient") == Verdict(rewound_to=1)
    assert same(world.state(), saved)
    assert not world.save(), "it has not been tried yet"
    assert world.run() == Verdict() and world.save()


def test_a_rewind_leaves_out_a_corrupt_checkpoint(make_world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world("rewind", 0)
    world.run()
    world.save()
    saved = world.state()
    world.run()
    world.save()
    shard = next((world.root / "step-00000002").glob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert world.run("loss") == Verdict(rewound_to=1)
    assert same(world.state(), saved) and "step-00000002 is corrupt and is not used" in caplog.text


def test_a_second_rewind_without_a_finite_step_between_ends_the_run(make_world: MakeWorld) -> None:
    world = make_world("rewind", 0)
    world.run()
    world.save()
    assert world.run("loss") == Verdict(rewound_to=1)
    assert isinstance(world.run("loss").error, NonFiniteError)


def test_a_rewind_without_a_checkpoint_ends_the_run(make_world: MakeWorld) -> None:
    assert isinstance(make_world("rewind", 0).run("loss").error, NonFiniteError)


def test_a_rewind_does_not_wait_for_ever_for_a_checkpoint_to_become_complete(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "COMMIT_LIMIT_S", 0.0)
    world = make_world("rewind", 0)
    world.run()
    world.save()
    world.run()
    world.saved = 2  # written, but the driver never completes it
    assert world.run("loss") == Verdict(rewound_to=1)


def test_weights_that_are_not_finite_never_become_a_checkpoint(make_world: MakeWorld) -> None:
    world = make_world("stop")
    world.run()
    assert world.save()
    assert world.run("weights") == Verdict()
    with pytest.raises(NonFiniteError, match="weights or optimizer state that are not finite"):
        world.save()
    assert [path.name for path in world.root.iterdir()] == ["step-00000001"]


def test_a_rewind_also_follows_such_weights(make_world: MakeWorld) -> None:
    world = make_world("rewind", 0)
    world.run()
    world.save()
    saved = world.state()
    world.run("weights")
    assert not world.save() and same(world.state(), saved)
    assert world.run() == Verdict(rewound_to=1), "the next step's metrics say it"


def test_optimizer_state_that_is_not_finite_is_found_and_large_numbers_are_finite(make_world: MakeWorld) -> None:
    world = make_world()
    world.run()
    assert world.trainer.state_is_finite()
    values = next(iter(world.trainer.optimizer.state.values()))["exp_avg_sq"]
    values.to_local().view(-1)[:2] = 3e38  # their norm is infinite
    assert world.trainer.state_is_finite()
    values.to_local().view(-1)[0] = float("nan")
    assert not world.trainer.state_is_finite()


@pytest.mark.parametrize(("spoils", "is_lost"), [((), False), (("loss",), False), (("loss", "loss"), True)])
def test_a_run_must_not_end_in_the_middle_of_skipped_steps(
    make_world: MakeWorld, spoils: tuple[str, ...], is_lost: bool
) -> None:
    world = make_world()
    for spoil in (None, *spoils):
        assert world.run(spoil).error is None
    if is_lost:
        with pytest.raises(NonFiniteError, match="the run ends with 2 steps in a row"):
            world.health.check_end(world.step)
    else:
        world.health.check_end(world.step)


def test_a_run_must_not_end_with_weights_that_are_not_finite(make_world: MakeWorld) -> None:
    world = make_world()
    world.run("weights")
    with pytest.raises(NonFiniteError, match="ends with weights"):
        world.health.check_end(1)


# --- spikes ----------------------------------------------------------------------------------------------------------


def test_without_on_spike_a_spike_is_a_step_like_any_other(make_world: MakeWorld) -> None:
    world = make_world()
    for _ in range(LEAST_STEPS):
        world.run()
    before = world.state()
    assert world.run("spike") == Verdict() and not same(world.state(), before)


def test_a_spike_makes_no_update_and_is_not_remembered(make_world: MakeWorld) -> None:
    world = make_world("stop", 2, "skip")
    for _ in range(LEAST_STEPS):
        world.run()
    before, limit = world.state(), world.trainer.recent.limit
    assert [world.run("spike").error for _ in range(2)] == [None, None]
    assert same(world.state(), before) and world.trainer.recent.limit == limit
    assert world.run() == Verdict() and not same(world.state(), before), "the next step is a step like any other"
    errors = [world.run("spike").error for _ in range(3)]
    assert errors[:2] == [None, None] and "steps whose loss is a spike, 3 in a row" in str(errors[2])
    assert "training.on_spike is skip" in str(errors[2])


def test_a_spike_stops_or_rewinds_by_choice(make_world: MakeWorld) -> None:
    world = make_world("skip", 0, "rewind")
    for _ in range(LEAST_STEPS):
        world.run()
    world.save()
    saved = world.state()
    world.run()
    assert world.run("spike") == Verdict(rewound_to=LEAST_STEPS) and same(world.state(), saved)
    world = make_world("skip", 5, "stop")
    for _ in range(LEAST_STEPS):
        world.run()
    assert isinstance(world.run("spike").error, NonFiniteError)


def test_a_resumed_run_knows_the_losses_until_its_checkpoint(make_world: MakeWorld) -> None:
    world = make_world("skip", 5, "skip")
    lines = []
    for step in range(1, LEAST_STEPS + 4):
        is_spike = step == LEAST_STEPS + 2
        world.run("spike" if is_spike else None)
        result = world.health._last
        assert result is not None and result.is_spike == is_spike
        lines.append({"step": step, "loss": result.loss, "num_samples": result.num_samples, "skipped": is_spike})
    limit = world.trainer.recent.limit
    lines.append({"step": step + 1, "loss": 1e9, "num_samples": 2, "skipped": False})  # cut off by the resume
    (world.root.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    world.trainer.recent.replace([])
    world.health.recall(step)
    assert world.trainer.recent.limit == limit
