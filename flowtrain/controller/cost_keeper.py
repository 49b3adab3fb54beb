"""What a run's microbatches cost: the cost model that plans steps, and the measured one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from flowtrain.controller.prepare import RunSpec
from flowtrain.costs.microbatch_costs import FittedCost, MicrobatchCosts
from flowtrain.costs.profile import Profile, library_versions, model_facts, planned_profile
from flowtrain.observability.files import replace_text
from flowtrain.observability.run_dir import RunDir
from flowtrain.scheduler.run_cost import check_device, is_refitted, profiled_model
from flowtrain.types.events import CostFitted
from flowtrain.types.plan import CostModel

logger = logging.getLogger(__name__)


class CostKeeper:
    """Keeps the cost in use, checks the profile that it came from, and writes ``profile.json``.

    frozen: the cost in the checkpoint that the run resumes from. It takes precedence over the configuration's, so that
    plans stay the same even if the profile's file has changed.
    note: shows a line to the user.
    """

    def __init__(self, run_spec: RunSpec, files: RunDir, frozen: CostModel | None, note: Callable[[str], None]) -> None:
        self._run_spec = run_spec
        self._files = files
        self._frozen = frozen
        self._note = note
        self._device: str | None = None
        self._fitted: CostFitted | None = None
        self.in_use = frozen or run_spec.cost
        if frozen is not None and frozen != run_spec.cost and not is_refitted(run_spec.config):
            logger.warning(
                "steps are planned with the checkpoint's cost (%s), not the configuration's (%s)", frozen, run_spec.cost
            )

    def rewind(self, frozen: CostModel | None) -> None:
        """Go back to a checkpoint's cost; None: to the configuration's."""
        self._frozen, self._fitted = frozen, None
        self.in_use = frozen or self._run_spec.cost

    @property
    def r2(self) -> float | None:
        """Share of the variance of the measured times that the last fit explains; None before the first fit."""
        return self._fitted.r2 if self._fitted is not None else None

    def start(self, device: str) -> None:
        """Note the backbone's device; raises ConfigError if the profile was measured on another one."""
        self._device = device
        profile = self._run_spec.cost_profile
        if profile is not None and self._frozen is None:
            check_device(profile, device, library_versions())

    def take(self, event: CostFitted) -> None:
        """Keep a fit; if it is in use from now on, show that."""
        self._fitted = event
        if event.in_use:
            self.in_use = event.cost
            self._note(
                f"step {event.step}: costs are now fitted to {event.num_rows} microbatches (R2 {event.r2:.3f} with "
                f"{event.form}, {event.other_r2:.3f} with the other form)"
            )

    def write(self) -> None:
        """Write the last fit, if any, into the run's profile: the one that it was planned with, or a new one."""
        if self._fitted is None:
            return
        fitted, config, spec = self._fitted, self._run_spec.config, self._run_spec.model_spec
        assert self._device is not None
        costs = MicrobatchCosts(
            FittedCost(fitted.cost, fitted.form, fitted.r2, fitted.other_r2, fitted.num_rows),
            profiled_model(config, spec),
            config.scheduler.microbatch_tokens,
        )
        measured = planned_profile(config, self._device)
        profile = measured or Profile(self._device, model_facts(config, spec), library_versions())
        replace_text(self._files.profile, replace(profile, microbatches=costs).to_json())
