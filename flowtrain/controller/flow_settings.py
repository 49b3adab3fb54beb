"""What the flow of a run starts from that has trained nothing yet."""

from __future__ import annotations

from flowtrain.actors.make_flow import FlowSettings
from flowtrain.controller.prepare import Prepared
from flowtrain.data.feed import sampler_from_config


def first_settings(prepared: Prepared) -> FlowSettings:
    """Return them; a resumed run has its sampler, cost and counts from the checkpoint instead."""
    degrees = prepared.plan.backbone.degrees
    return FlowSettings(
        config=prepared.config,
        model_spec=prepared.model_spec,
        dp_size=degrees.dp,
        num_steps=prepared.num_steps,
        total_positions=prepared.total_positions,
        eval_every=prepared.eval_every,
        num_eval=prepared.num_eval,
        start_step=0,
        sampler_state=sampler_from_config(prepared.config, prepared.source_sizes).state().to_dict(),
        cost=prepared.cost,
        num_rejected=0,
        num_seen=0,
        replica_size=degrees.replica_size,
    )
