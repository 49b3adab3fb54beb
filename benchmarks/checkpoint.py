"""How long a checkpoint stops training, against a plain copy of the same state; and how large it is.

python benchmarks/checkpoint.py [--model NAME] [--repeats N] [--quick] [--json]

One rank, random weights, AdamW with its state, float32. A save in the background blocks the training thread for the
snapshot; that takes turns with a plain copy: every tensor of the state into memory that already exists. The background
write ends before the next turn. For comparison, the same checkpoint is written while training waits. Then the connector
alone is trained, so that the language model is frozen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _backbone_runs import MODELS, Setting
from _report import Figure, at_most, commit, emit
from rich.console import Console
from shared.backbone_data import FEATURE_DIM
from shared.text_source import TextSource

from flowtrain.config.run import RunConfig
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.initial_weights import BuiltWeights
from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.saver import CheckpointSaver
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees

MOST_BLOCKED = 2.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Source(TextSource):
    """The trainer's model source: a language model of random weights, frozen or not, and a connector."""

    setting: Setting
    freezes: bool

    def backbone_skeleton(self) -> Backbone:
        return self._backbone(torch.device("meta"))

    def backbone_weights(self) -> BuiltWeights:
        return BuiltWeights(lambda: self._backbone(CPU))

    def _backbone(self, device: torch.device) -> Backbone:
        model = self.setting.language_model(implementation_name("sdpa"), device)
        model.requires_grad_(not self.freezes)
        with device:
            return Backbone(Connector(FEATURE_DIM, model.config.hidden_size), model)


def make_trainer(setting: Setting, group: BackboneGroup, *, freezes: bool) -> Trainer:
    """A trainer whose optimizer has its state."""
    values = setting.run_config().model_dump()
    values["model"]["freeze"] = ["backbone"] if freezes else []
    trainer = Trainer(RunConfig.model_validate(values), Source(setting, freezes), group, 1000)
    for _, parameter in trainer.model.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e-3) if parameter.requires_grad else None
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return trainer


def make_saver(trainer: Trainer, group: BackboneGroup, *, background: bool) -> CheckpointSaver:
    """The saver of a backbone rank, without a run."""

    def report(step: int, directory: Path, problem: str | None) -> None:
        assert problem is None, problem

    return CheckpointSaver(
        group,
        trainer.snapshot,
        trainer.write_snapshot,
        report,
        lambda *args, **kwargs: None,
        background=background,
        saved_step=0,
    )


def measure(trainer: Trainer, group: BackboneGroup, folder: Path, repeats: int, console: Console) -> list[Figure]:
    """Seconds that the training thread is blocked, in turns with a plain copy."""
    state = [local_shard(tensor) for tensor in trainer.snapshot(None).tensors.values()]
    copies = [torch.zeros_like(tensor) for tensor in state]
    saver = make_saver(trainer, group, background=True)
    saver.prepare()
    saver.wait()
    first_s = blocked(saver, 1, folder)
    pairs: list[tuple[float, float]] = []
    for turn in range(2, repeats + 2):
        if turn % 2:
            plain_s, blocked_s = copied(state, copies), blocked(saver, turn, folder)
        else:
            blocked_s, plain_s = blocked(saver, turn, folder), copied(state, copies)
        pairs.append((blocked_s, plain_s))
        console.print(f"turn {turn - 1}: blocked {blocked_s:.3f} s, plain copy {plain_s:.3f} s", highlight=False)
    check(trainer, folder / f"step-{repeats + 1}")
    foreground = make_saver(trainer, group, background=False)
    waits_s = blocked(foreground, repeats + 2, folder)
    ratios = sorted(blocked_s / plain_s for blocked_s, plain_s in pairs)
    nbytes = sum(tensor.nbytes for tensor in state)
    spread = f"median of {repeats} pairs, {ratios[0]:.2f} to {ratios[-1]:.2f}; state of {nbytes / 1e6:.0f} MB"
    return [
        at_most("blocked_over_plain_copy", statistics.median(ratios), "ratio", MOST_BLOCKED, spread),
        Figure("blocked", statistics.median(each for each, _ in pairs), "s"),
        Figure("plain_copy", statistics.median(each for _, each in pairs), "s", note="into memory that exists"),
        Figure("first_blocked", first_s, "s", note="the first save of a run, after its first step"),
        Figure("blocked_in_the_foreground", waits_s, "s", note="checkpoint.background: false, once"),
    ]


def blocked(saver: CheckpointSaver, step: int, folder: Path) -> float:
    """Seconds that the training thread is in ``save``; the write has ended on return."""
    started = time.perf_counter()
    saver.save(step, folder / f"step-{step}")
    seconds = time.perf_counter() - started
    saver.wait()
    return seconds


def copied(state: list[torch.Tensor], copies: list[torch.Tensor]) -> float:
    """Seconds of a plain copy."""
    started = time.perf_counter()
    for tensor, copy in zip(state, copies, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - started


def check(trainer: Trainer, directory: Path) -> None:
    """Compare what was written with the weights; exits with 1 if they differ."""
    stored = load_backbone_state(directory)
    for name, parameter in trainer.model.named_parameters():
        if not torch.equal(stored[name], local_shard(parameter)):
            raise SystemExit(f"{name} in the checkpoint is not the model's")


def nbytes_of(directory: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in directory.iterdir())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(MODELS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; by default a temporary directory")
    parser.add_argument("--quick", action="store_true", help="a small model, two repeats: does it run?")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    console = Console(stderr=args.json)
    model, repeats = ("small", 2) if args.quick else (args.model, args.repeats)
    console.print(f"checkpoint ({commit()}), {model}, {args.threads} threads")
    setting = Setting(model, "float32", args.threads, CPU, {})
    group = init_backbone_group(0, Degrees(), CPU)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        whole = make_trainer(setting, group, freezes=False)
        figures = measure(whole, group, Path(folder), repeats, console)
        all_nbytes = nbytes_of(Path(folder) / "step-1")
        del whole
        connector = make_trainer(setting, group, freezes=True)
        connector.save_checkpoint(Path(folder) / "connector")
        connector_nbytes = nbytes_of(Path(folder) / "connector")
    group.close()
    note = f"the language model is frozen; {all_nbytes:,} bytes if it is trained too"
    figures.append(Figure("connector_checkpoint", connector_nbytes, "bytes", note=note))
    emit("checkpoint", figures, args.json)


if __name__ == "__main__":
    main()
