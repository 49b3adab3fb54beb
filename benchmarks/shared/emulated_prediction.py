"""What the simulator says of a split of emulated devices, on the very batches that its run trains."""

from __future__ import annotations

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.simulated_flow import FlowCandidate
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.controller.planning.request import device_times, surrogates
from flowtrain.controller.prepare import prepare
from flowtrain.costs.operators import OperatorRules
from shared.emulated_run import WARM_UP_STEPS, config_of
from shared.emulated_splits import Split
from shared.emulated_world import BATCH, DEVICE, PERIOD_STEPS, VISION, World


def simulated_rate(world: World, split: Split, num_steps: int) -> float:
    """Return samples/s over the steps that a run measures: so many after the warm-up.

    The coordinator's own flow is driven in virtual time.
    """
    last = WARM_UP_STEPS + num_steps
    config, request = config_of(world, split, last), world.request.decided()
    times_of = device_times(config, OperatorRules.of(config.costs), world.profile)
    candidate = ModeCandidate(
        "decoupled",
        Candidate(BACKBONE, DEVICE, split.backbone),
        {VISION: Candidate(VISION, DEVICE, split.encoder)},
        devices=split.num_devices,
    )
    # The data's order is not mixed, and repeats after so many steps.
    batches = DrawnBatches(np.arange(BATCH * PERIOD_STEPS).reshape(PERIOD_STEPS, BATCH), config.step_scheduler)
    surrogate, plan = surrogates(times_of)(request), prepare(config).plan
    ends_s = FlowCandidate(request, surrogate, times_of, candidate, batches, config, plan).simulated(last).ends_s
    return float(BATCH * num_steps / (ends_s[last - 1] - ends_s[WARM_UP_STEPS - 1]))
