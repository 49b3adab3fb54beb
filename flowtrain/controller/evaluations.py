"""A run's evaluations: the losses that metrics and checkpoints have, and what the model answered."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flowtrain.config.evaluation import EVAL_LOSS, eval_loss_of
from flowtrain.controller.held_out import HeldOutSamples
from flowtrain.controller.prepare import RunSpec
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.files import PRIVATE_DIRECTORY, replace_bytes, replace_text
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.evaluation import GeneratedAnswer
from flowtrain.types.events import UnitDone
from flowtrain.types.run_events import EvaluationFinished, GeneratedSample

MAX_TEXT = 10_000
"""Characters that are kept of a prompt and of a reference."""
GENERATED_SCHEMA = 1


@dataclass
class StepLosses:
    """The losses of the evaluations after one step."""

    by_set: dict[str, float] = field(default_factory=dict)
    _weights: list[int] = field(default_factory=list)

    def add(self, name: str, loss: float, weight: int) -> None:
        """Add a set; weight: what its loss is a mean over, target tokens or samples."""
        self.by_set[name] = loss
        self._weights.append(weight)

    @property
    def mean(self) -> float | None:
        """The loss over all sets as if they were one; None without a set."""
        losses, total = list(self.by_set.values()), sum(self._weights)
        if len(losses) < 2 or not total:
            return losses[0] if losses else None
        return math.fsum(loss * weight for loss, weight in zip(losses, self._weights, strict=True)) / total

    def as_metrics(self) -> dict[str, float]:
        """The finite ones by the names that ``checkpoint.keep_best`` has for them."""
        named = {EVAL_LOSS: self.mean} | {eval_loss_of(name): loss for name, loss in self.by_set.items()}
        return {name: loss for name, loss in named.items() if loss is not None and math.isfinite(loss)}


class Evaluations:
    """Takes in evaluation rounds, and writes what was answered in them under ``generated/``.

    first_step: steps done before this start; what later ones wrote is removed.
    """

    def __init__(self, run_spec: RunSpec, files: RunDir, first_step: int) -> None:
        config = run_spec.config
        self._files = files
        self._names = tuple(config.data.eval_sets)
        self._first_steps = [rounds.every for rounds in run_spec.evaluations]
        self._by_token = config.training.loss_normalization == "token"
        counts = [
            0 if config.emulation is not None else min(each.num_generated, rounds.num_samples)
            for each, rounds in zip(config.data.eval_sets.values(), run_spec.evaluations, strict=True)
        ]
        self._samples = HeldOutSamples(config.data, run_spec.indexes, counts)
        self._pictures: dict[tuple[str, int], tuple[str, ...]] = {}
        self._writing = Diagnostic(f"{files.generated.name}/", retries=True)
        self._losses: dict[int, StepLosses] = {}
        self.forget_after(first_step)

    def forget_after(self, step: int) -> None:
        """Drop what evaluations of later steps wrote; these steps are done again."""
        self._losses = {known: losses for known, losses in self._losses.items() if known <= step}
        self._pictures.clear()  # some may be gone; the others are written again
        if self._files.generated.is_dir():
            for path in self._files.generated.iterdir():
                if path.name.isdecimal() and int(path.name) > step:
                    shutil.rmtree(path, ignore_errors=True)

    def take(self, done: UnitDone, duration_s: float) -> EvaluationFinished:
        """Take in a round of one set, which took so long."""
        unit, report = done.unit, done.reports[0]
        name = self._names[unit.eval_set]
        weight = report.num_target_tokens if self._by_token else report.num_samples
        self._losses.setdefault(unit.step, StepLosses()).add(name, report.loss, weight)
        generated = tuple(self._shown(unit.eval_set, row, answer) for row, answer in _answers(done))
        if generated:
            self._writing.attempt(self._write, unit.step, name, generated)
        return EvaluationFinished(
            step=unit.step,
            name=name,
            loss=report.loss,
            num_samples=report.num_samples,
            num_target_tokens=report.num_target_tokens,
            duration_s=duration_s,
            generated=generated,
        )

    def of_step(self, step: int) -> StepLosses:
        """Return the losses of the evaluations after a step, as far as they are known."""
        return self._losses.get(step, StepLosses())

    def forget_before(self, step: int) -> None:
        """Drop the losses of steps up to ``step``; no later checkpoint needs them."""
        self._losses = {known: losses for known, losses in self._losses.items() if known > step}

    def _shown(self, eval_set: int, row: int, answer: GeneratedAnswer) -> GeneratedSample:
        name = self._names[eval_set]
        sample = self._samples.get(eval_set, row)
        if sample is None:
            return GeneratedSample(name, row, "", "", answer.text[:MAX_TEXT])
        if (name, row) not in self._pictures:
            self._writing.attempt(self._save_pictures, self._first_steps[eval_set], name, row, sample.pictures)
        return GeneratedSample(
            source=name,
            row=row,
            prompt=sample.prompt[:MAX_TEXT],
            reference=sample.reference[:MAX_TEXT],
            text=answer.text[:MAX_TEXT],
            images=self._pictures.get((name, row), ()),
        )

    def _save_pictures(self, step: int, name: str, row: int, pictures: tuple[bytes, ...]) -> None:
        """Write the pictures of a row beside the first answers to it; later ones, also after a resume, name these."""
        paths = [self._directory(step) / f"{name}-{row}-{number}.png" for number in range(len(pictures))]
        for path, picture in zip(paths, pictures, strict=True):
            replace_bytes(path, picture)
        self._pictures[name, row] = tuple(str(path.relative_to(self._files.root)) for path in paths)

    def _write(self, step: int, name: str, generated: Iterable[GeneratedSample]) -> None:
        """Write the answers, one object a line."""
        records = ({"schema": GENERATED_SCHEMA, "step": step, **asdict(each)} for each in generated)
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        replace_text(self._directory(step) / f"{name}.jsonl", text)

    def _directory(self, step: int) -> Path:
        directory = self._files.generated / str(step)
        for path in (self._files.generated, directory):
            path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        return directory


def _answers(done: UnitDone) -> list[tuple[int, GeneratedAnswer]]:
    """The answers of all replicas with the rows they are to, in the order of the rows."""
    answers = [answer for report in done.reports for answer in report.generated]
    return sorted(
        ((answer.position - done.unit.first_position, answer) for answer in answers), key=lambda pair: pair[0]
    )
