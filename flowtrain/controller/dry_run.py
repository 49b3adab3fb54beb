"""What a run would do, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.config.run import RunConfig
from flowtrain.controller.predict import image_tokens
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.controller.resume import Resumption, foresee_resume


@dataclass(frozen=True)
class DryRunReport:
    """What a run would be."""

    run: RunSpec
    """Its configuration, plan, steps, data and model."""
    image_tokens: dict[str, tuple[int, int]]
    """By encoder: the fewest and the most tokens of an image, see ``predict.image_tokens``."""
    resumption: Resumption | None = None
    """The step that a resume would go on from, and what changed; None if no resume was asked for."""


def foresee_run(config: RunConfig, resume: bool = False) -> DryRunReport:
    """Look at data, model headers and checkpoints as a run would; raises the same ConfigError or DataError."""
    run_spec = prepare(config)
    return DryRunReport(run_spec, image_tokens(run_spec), foresee_resume(run_spec) if resume else None)
