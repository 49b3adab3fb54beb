"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flowtrain.allocator.plan import requirements
from flowtrain.config.modes import colocated_shares
from flowtrain.config.run import RunConfig
from flowtrain.costs.cluster import accelerator_type
from flowtrain.costs.start_limit import start_limit
from flowtrain.observability.run_dir import RunDir
from flowtrain.scheduler.run_cost import cost_label
from flowtrain.types.plan import Degrees

if TYPE_CHECKING:
    from flowtrain.allocator.run_memory import RunMemory
    from flowtrain.controller.predict import ImageTokens
    from flowtrain.controller.prepare import RunSpec
    from flowtrain.controller.resume import Resumption
    from flowtrain.controller.summary import RunSummary
    from flowtrain.costs.action_times import DeviceTimes


_ENCODER_PLACES = {
    "first": "the encoder in the first stage",
    "mixed": "encoder and decoder layers in one sequence",
    "own": "the encoder in stages of its own",
}


def plan_tables(
    run_spec: RunSpec, image_tokens: Mapping[str, ImageTokens], resumes: bool = False
) -> tuple[Table, Table]:
    """The settings of a run, and its actors.

    image_tokens: by encoder. resumes: the run starts from a checkpoint.
    """
    config, needs = run_spec.config, requirements(run_spec.plan)
    run = Table(title=f"run {config.name}", title_justify="left", show_header=False)
    run.add_row("mode", f"{config.mode}, {config.model.dtype}, family {config.model.family}")
    run.add_row("parameters", _parameters(run_spec))
    for name, tokens in image_tokens.items():
        run.add_row("tokens an image", f"{name}: {_image_tokens(tokens)}")
    run.add_row("steps", f"{run_spec.num_steps} of {config.training.global_batch_size} samples")
    for name, size in zip(run_spec.source_names, run_spec.source_sizes, strict=True):
        run.add_row(f"data {name}", f"{size:,} samples")
    for (name, held_out), rounds in zip(config.data.eval_sets.items(), run_spec.evaluations, strict=True):
        label = "evaluation" if config.data.eval is held_out else f"evaluation {name}"
        count = 0 if config.emulation is not None else min(held_out.num_generated, rounds.num_samples)
        answered = f", {count:,} of them answered by the model" if count else ""
        run.add_row(label, f"{rounds.num_samples:,} samples every {rounds.every} steps{answered}")
    run.add_row("order", _order(config))
    run.add_row("oversized", f"more than {config.data.max_seq_len:,} tokens: {config.data.oversized}")
    if (policy := _policy(run_spec)) is not None:
        run.add_row("policy", policy)
    scheduler = config.step_scheduler
    start = "searched, which starts from " if config.pipeline.policy == "pipetune" else ""
    run.add_row("packing", f"{start}{scheduler.packing}, {scheduler.microbatch_tokens:,} tokens a microbatch")
    run.add_row("dispatch", f"{config.scheduler.dispatch}, {config.scheduler.num_buckets} buckets")
    run.add_row("cost", _cost(run_spec))
    run.add_row("backbone ranks", _backbone_ranks(run_spec.plan.backbone.degrees))
    if run_spec.plan.backbone.degrees.pp > 1:
        slices = run_spec.partition.num_segments
        stages = f"{slices} slices of the layers a rank" if slices > 1 else "a slice of the layers a rank"
        place = f", {_ENCODER_PLACES[config.pipeline.encoder_layers]}" if config.mode == "monolithic" else ""
        run.add_row("pipeline", f"{config.pipeline.schedule}, {stages}{place}{_cut(run_spec)}")
    run.add_row("memory settings", _memory_settings(config))
    run.add_row("CPUs", f"{needs.num_cpus:g}")
    run.add_row("devices", _devices(config, needs.num_devices))
    run.add_row("feeders", _feeders(run_spec))
    if config.exchanges_units:
        run.add_row("exchange", "point to point: a step's features all together, and encoders one step ahead at most")
    run.add_row("memory pool", f"{nbytes_text(needs.pool_nbytes)} at most; unused pages take no memory")
    if (warning := run_spec.warmup_warning) is not None:
        run.add_row("warning", warning)
    run.add_row("start", f"within {start_limit(config.limits.start_timeout_s, run_spec.model_spec, resumes).text}")

    actors = Table(title="actors", title_justify="left")
    for heading in ("module", "actors", "CPUs each", "devices each", "pool segment each"):
        actors.add_column(heading, justify="left" if heading == "module" else "right")
    for name, module in run_spec.plan.without_devices().modules():  # what is certain without a cluster
        segment = nbytes_text(module.segment_nbytes) if module.segment_nbytes else "-"
        if module.segment_nbytes and module.degrees.replica_size > 1:
            segment += " a replica"
        actors.add_row(name, str(module.num_actors), f"{module.num_cpus:g}", f"{module.num_devices:g}", segment)
    actors.add_row("coordinator", "1", "0", "0", "-")
    return run, actors


def _image_tokens(tokens: ImageTokens) -> str:
    if tokens.fewest == tokens.most:
        return f"{tokens.fewest:,}"
    if tokens.are_seen:
        return f"{tokens.fewest:,} to {tokens.most:,} in the first step's samples"
    limits = f"the encoder's limits are {tokens.fewest:,} to {tokens.most:,}"
    return f"unknown, as none of the first step's accepted samples has an image; {limits}"


def memory_table(run_spec: RunSpec, memory: RunMemory) -> Table:
    """Which layers each pipeline rank has, and the memory that it is predicted to take."""
    title = "memory of a device, predicted from a few of the samples"
    table = Table(title=title, title_justify="left")
    for heading in ("ranks", "layers", "weights and optimizer", "activations", "peak"):
        table.add_column(heading, justify="left" if heading in ("ranks", "layers") else "right")
    partition = run_spec.partition
    for rank, need in enumerate(memory.ranks):
        name = "backbone" if len(memory.ranks) == 1 else f"pipeline rank {rank}"
        state = need.parameters + need.gradients + need.optimizer_state + need.accumulated + need.frozen
        sizes = (state, need.activations, need.peak)
        table.add_row(name, partition.rank_text(rank), *map(nbytes_text, sizes))
    for name, nbytes in memory.encoders.items():
        table.add_row(f"encoder {name}", "all that features need", "", "", nbytes_text(nbytes))
    if run_spec.config.mode == "colocated":
        table.add_row("both on a device", "", "", "", nbytes_text(memory.device_nbytes))
    return table


def resume_table(resumption: Resumption, num_steps: int) -> Table:
    """The step that a resume would go on from, and what it would change."""
    table = Table(title="resume", title_justify="left", show_header=False)
    if resumption.step is None:
        table.add_row("goes on", f"from the beginning: {resumption.directory} has no complete checkpoint")
    elif resumption.step >= num_steps:
        table.add_row("goes on", f"not at all: step {resumption.step} of {num_steps} was the last")
    else:
        table.add_row("goes on", f"after step {resumption.step} of {num_steps}")
    for line in resumption.inexact:
        table.add_row("not exact", line)
    for change in resumption.changes:
        table.add_row(change.key, f"{change.old} -> {change.new}")
    if resumption.step is not None and not resumption.changes:
        table.add_row("changes", "none")
    if resumption.older is not None:
        table.add_row("older", resumption.older)
    for line in resumption.notes:
        table.add_row("exact", line)
    return table


def summary_table(summary: RunSummary) -> Table:
    """How a run ended, and where its files are."""
    run = RunDir(summary.directory)
    table = Table.grid(padding=(0, 2))
    ended = "stopped" if summary.stopped else "done"
    since = f" since the start after step {summary.start_step}" if 0 < summary.start_step < summary.step else ""
    table.add_row(ended, f"step {summary.step} of {summary.num_steps} in {summary.duration_s:.0f} s{since}")
    for name, loss in (("loss", summary.loss), ("held-out loss", summary.eval_loss)):
        if loss is not None:
            table.add_row(name, f"{loss:.4f}")
    if summary.num_rejected:
        table.add_row("quarantined", f"{summary.num_rejected} so far: {run.quarantine}")
    if summary.num_skipped:
        table.add_row("skipped", f"{summary.num_skipped} steps so far, which made no update: {run.skipped}")
    if summary.cost_r2 is not None:
        table.add_row("measured costs", f"R2 {summary.cost_r2:.3f}: {run.profile}")
    if summary.emulated is not None:
        table.add_row("emulated", summary.emulated)
    if summary.host_warning is not None:
        table.add_row("warning", summary.host_warning)
    for each in summary.trackers_off:
        table.add_row("tracker", Text(each))
    planned, measured = summary.planned_tokens_per_s, summary.tokens_per_s
    if planned is not None and measured is not None:
        table.add_row("rate", f"planned {planned:,.0f} tokens/s, measured {measured:,.0f}")
    if run.report.is_file():
        table.add_row("report", str(run.report))
    for name, path in (("metrics", run.metrics), ("ledger", run.ledger), ("trace", run.trace)):
        table.add_row(name, str(path))
    if summary.checkpoint is not None:
        table.add_row("checkpoint", str(summary.checkpoint))
        table.add_row("export it", f"flowtrain export {run.root}")
    if summary.stopped and summary.emulated is None:
        table.add_row("go on", run.resume_command)
    return table


def _parameters(run_spec: RunSpec) -> str:
    """Total and trainable parameters of what the mode has; an encoder counts only what its features need."""
    spec, freeze = run_spec.model_spec, run_spec.config.frozen_modules
    encoders = {} if run_spec.config.mode == "llm_only" else spec.encoders
    whole = "encoders" not in freeze
    counts = {
        name: (each.num_computed_parameters, whole * each.num_computed_parameters) for name, each in encoders.items()
    }
    for name, part in (("connector", spec.connector), ("backbone", spec.backbone)):
        counts[name] = part.num_parameters, part.num_trained_parameters * (name not in freeze)
    each = ", ".join(f"{name} {count:,}{_frozen(count, trained)}" for name, (count, trained) in counts.items())
    total = sum(count for count, _ in counts.values())
    return f"{total:,}, of them {spec.num_trainable_parameters(freeze):,} trainable: {each}"


def _frozen(count: int, trained: int) -> str:
    if trained == count:
        return ""
    return f" ({trained:,} trained)" if trained else " (frozen)"


def _devices(config: RunConfig, num_devices: float) -> str:
    if (emulation := config.emulation) is not None:
        return f"emulated: {emulation.device}, {emulation.devices_per_node} a node (docs/emulated.md)"
    if not num_devices:
        return "none"
    shares = ""
    if config.mode == "colocated":
        encoders, rest = colocated_shares(config)
        of_each = ", ".join(f"{name} {share:g}" for name, share in (*encoders.items(), ("backbone", rest)))
        shares = f" (of each: {of_each})"
    return f"{num_devices:g} where the cluster has GPUs{shares}, else none"


def _policy(run_spec: RunSpec) -> str | None:
    """What ``pipeline.policy`` does to steps, and for which devices; None if it leaves them to the scheduler."""
    config, search = run_spec.config, run_spec.search
    if search is None:
        return None if config.pipeline.policy == "none" else config.pipeline.policy
    parts = config.pipeline.pipetune
    searched = [
        text
        for text, is_on in (
            ("the number of microbatches", parts.size),
            ("the order of microbatches", parts.order),
            ("what is encoded ahead", parts.precompute and run_spec.can_encode_ahead),
        )
        if is_on
    ]
    device = _searched_device(config, search.simulator.times.times)
    return f"pipetune searches {', '.join(searched) or 'the packing alone'}; times of {device}"


def _searched_device(config: RunConfig, times: DeviceTimes) -> str:
    """Whose times a search of steps takes."""
    if times.profile is not None:
        return f"the devices of {times.profile.source}"
    name = accelerator_type(times.device.name)
    if config.emulation is not None:
        return f"emulated {name} by data sheets"
    return f"{name} by data sheets, whatever the run's devices are"


def _cut(run_spec: RunSpec) -> str:
    """The layers of each stage, and the word that chose them; empty where ``pipeline.partition`` is not given."""
    counts, word = run_spec.config.pipeline.counts, run_spec.partition_word
    if counts is None:
        return ""
    by = f" by pipeline.partition {word}" if word is not None else ""
    return f", cut into {' + '.join(map(str, counts))} layers{by}"


def _memory_settings(config: RunConfig) -> str:
    backbone, words = config.backbone, config.backbone.activation_checkpointing
    if words == "every_n":
        recomputed = f"every {backbone.checkpoint_every}th layer"
    else:
        recomputed = words if isinstance(words, str) else f"by layer ({', '.join(words)})"
    sharding = f"{backbone.sharding} sharding, gradients summed: {backbone.gradient_reduction}"
    return f"activation checkpointing {recomputed}; {sharding}"


def _backbone_ranks(degrees: Degrees) -> str:
    if degrees.replica_size == 1:
        return f"{degrees.dp:,} data-parallel"
    return f"{degrees.world_size:,}: {degrees.dp:,} data x {degrees.pp} pipeline x {degrees.tp} tensor parallel"


def _feeders(run_spec: RunSpec) -> str:
    feeder, need = run_spec.plan.feeder, run_spec.feeder_need
    each = f"up to {need.samples} samples of {nbytes_text(need.sample_nbytes)} and {nbytes_text(need.held_nbytes)} of "
    return f"{feeder.data_parallel_size}, each with {each}open blocks"


def _order(config: RunConfig) -> str:
    if config.data.order == "deterministic":
        return "deterministic"
    return f"arrival, within {config.scheduler.lookahead_steps} steps"


def _cost(run_spec: RunSpec) -> str:
    label, profile = cost_label(run_spec.config, run_spec.cost), run_spec.cost_profile
    if profile is None or profile.microbatches is None:
        return label
    return f"{label} (R2 {profile.microbatches.fitted.r2:.3f}): {profile.source}"


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and texts, one pair per row, without borders; long texts are folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))  # so that brackets in it are not read as markup
    return table


def nbytes_text(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
