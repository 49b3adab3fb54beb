"""What a run does before its actors start: it finds its place in the cluster, then opens its directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from ray.util.placement_group import PlacementGroup

from flowtrain.actors.pooling import hbm_offer
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster, local_ray
from flowtrain.controller.actor_specs import ActorSpec, actor_specs_of, bundles_of
from flowtrain.controller.elastic import degrees_text
from flowtrain.controller.mps import nodes_without_mps, without_mps_text
from flowtrain.controller.prepare import RunSpec, with_start_limit
from flowtrain.controller.resume import ResumePoint, changed_since, find_resume_point
from flowtrain.emulation.check import emulation_note
from flowtrain.mempool.tiers.hbm import NO_ACCELERATOR
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir, run_dir
from flowtrain.observability.stream import EventStream


@dataclass(frozen=True)
class PlacedRun:
    """A run for which Ray has reserved the resources."""

    run_spec: RunSpec
    """With the devices and the network that the cluster has for it."""
    specs: list[ActorSpec]
    group: PlacementGroup | None
    """None: its actors reserve nothing."""
    dashboard: str | None
    """Where Ray's dashboard listens, ``host:port``; None as for ``cluster.connected``."""


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory this process holds; its actors can start."""

    run_spec: RunSpec
    specs: list[ActorSpec]
    group: PlacementGroup | None
    dashboard: str | None
    files: RunDir
    start: ResumePoint


def place(run_spec: RunSpec, display: ProgressDisplay, stack: ExitStack) -> PlacedRun:
    """Connect to Ray, or start it, and reserve the actors' resources; ``stack`` gives both back."""
    config = run_spec.config
    display.phase("connecting to Ray, or starting it")
    dashboard = stack.enter_context(cluster.connected(config))
    run_spec = replace(run_spec, plan=cluster.with_devices(run_spec.plan))
    specs = actor_specs_of(run_spec.plan)
    bundles = bundles_of(specs)
    segments_nbytes = sum(spec.segment_nbytes for spec in specs)
    strategy = cluster.check_resources(bundles, segments_nbytes, config.pool.network)
    display.phase(f"placing {len(specs)} actors")
    placing = cluster.placed(bundles, config.limits.placement_timeout_s, strategy)
    group = stack.enter_context(placing) if bundles else None
    return PlacedRun(replace(run_spec, config=cluster.with_network(config, group)), specs, group, dashboard)


def open_run(config: RunConfig, placed: PlacedRun, resume: bool, display: ProgressDisplay, stack: ExitStack) -> OpenRun:
    """Open the run's directory, which ``stack`` gives back, and find where the run begins.

    Call it after ``place``, so that a run for which the cluster has no room leaves no directory.
    config: as the user gave it, which the directory keeps; what this cluster decided is not part of it.
    """
    run_spec = placed.run_spec
    stack.enter_context(held_run_dir(config))
    changed = changed_since(run_dir(config), config)
    files = open_run_dir(config, resume)
    if degrees_text(config) == degrees_text(run_spec.config) or not files.plan.is_file():
        files.write_plan(asdict(run_spec.plan))
    start = find_resume_point(files, run_spec, changed) if resume else ResumePoint()
    # What is lost starts again from a checkpoint, also in a run that began without one.
    run_spec = with_start_limit(run_spec, resumes=start.checkpoint is not None or config.emulation is None)
    display.expect(run_spec.num_steps, start.step)
    stack.callback(display.close)  # before Ray ends, which takes a while
    return OpenRun(run_spec, placed.specs, placed.group, placed.dashboard, files, start)


def note_start(run: OpenRun, stream: EventStream) -> None:
    """Tell the user where the dashboard is, what encoders do with accelerators, and where the run goes on.

    Warns of a run that ends within its warmup.
    """
    run_spec, start = run.run_spec, run.start
    if run.dashboard is not None:
        token = local_ray.token_file(os.environ)
        asks = f"; it asks for the token in {token}" if token is not None and token.is_file() else ""
        stream.note(f"Ray's dashboard: http://{run.dashboard}{asks}")
    if run_spec.config.has_encoder_actors:
        _note_devices(run_spec, run.specs, stream)
    if (note := emulation_note(run_spec.config)) is not None:
        stream.note(note)
    if (warning := run_spec.warmup_warning) is not None:
        stream.warn(warning)
    if start.step:
        stream.note(f"resuming {run.files.root} after step {start.step} of {run_spec.num_steps}")


def _note_devices(run_spec: RunSpec, specs: Sequence[ActorSpec], stream: EventStream) -> None:
    has_device = any(spec.plan.num_devices for spec in specs)
    stream.note(hbm_offer(run_spec.config.pool, None if has_device else NO_ACCELERATOR)[1])
    if any(spec.waits for spec in specs) and (lacking := nodes_without_mps()):
        stream.warn(without_mps_text(lacking))
