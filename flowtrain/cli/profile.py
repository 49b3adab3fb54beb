"""``flowtrain profile``: prints tables of the measurements, and writes the file for ``flowtrain plan --profile``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowtrain import api
from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.cli.output_path import check_output_path
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.controller.profiling import ProfileReport
from flowtrain.costs.profile import Profile, StepCosts
from flowtrain.costs.profile_layers import Strategies
from flowtrain.errors import ConfigError


def profile(config: Path, overrides: Sequence[str], save: Path, devices: int | None, trials: bool) -> None:
    """Measure as ``api.profile`` does, write the profile and show it; ConfigError if it cannot be written."""
    check_output_path("--save", save)  # before minutes are spent
    console = Console(stderr=True)
    report = api.profile(
        config,
        overrides,
        devices=devices,
        trials=trials,
        progress=lambda what: console.print(f"measuring {what}", highlight=False),
    )
    try:
        save.write_text(report.profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {save}: the profile cannot be written: {error.strerror}") from error
    shown = Console()
    shown.print(*profile_tables(report, save), sep="\n")
    for warning in report.warnings:
        shown.print(f"warning: {warning}", style="yellow", highlight=False)


def profile_tables(report: ProfileReport, saved: Path) -> Iterator[Table]:
    """The devices, the encoders' and the backbone's times, and what else takes time."""
    profile, facts = report.profile, report.profile.known_facts
    link = "" if facts.link is None else f", {facts.link / 1e9:.3g} GB/s to the others"
    yield facts_table(
        [
            ("device", f"{report.num_devices} x {profile.device} side by side, {facts.devices_per_node} on the node"),
            (
                "each",
                f"{facts.flops / 1e12:.4g} TFLOP/s in {profile.model['dtype']}, {nbytes_text(facts.memory_nbytes)} at "
                f"{facts.bandwidth / 1e9:.4g} GB/s{link}",
            ),
        ]
    )
    yield from (_images(name, profile) for name in profile.encoders)
    yield from (_lengths(profile, tp) for tp in profile.layers)
    if profile.strategies:
        yield _strategies("a layer of the backbone", profile.strategies)
    for name, strategies in profile.encoder_strategies.items():
        if strategies:
            yield _strategies(f"a layer of encoders.{name}", strategies)
    steps, share = profile.steps, profile.forward_share
    forward = "" if share is None else f"; forwards take {share:.0%} of a layer's time"
    at_ends = f"{1e3 * steps.ends_s:.3g} ms and {1e9 * steps.ends_parameter_s:.3g} ns a parameter"
    ends = f"; {at_ends} in the first forward and the last backward" if steps.ends_s or steps.ends_parameter_s else ""
    images = [
        (
            f"an image for {name}",
            f"{1e3 * costs.decode_s:.3g} ms to read and decode; {1e3 * costs.batch_s:.3g} a batch",
        )
        for name, costs in profile.images.items()
    ]
    rest = [
        ("a microbatch", f"{1e3 * steps.microbatch_s:.3g} ms in addition to its layers, head and connector{forward}"),
        *_of_pipelines(steps),
        ("a step", f"{1e3 * steps.step_s:.3g} ms and {1e9 * steps.parameter_s:.3g} ns a parameter{ends}"),
        ("took", ", ".join(f"{what} {seconds:.1f} s" for what, seconds in report.seconds.items())),
        ("saved", f"{saved}; plan with flowtrain plan CONFIG --profile {saved}"),
    ]
    yield facts_table([*images, *_together(profile), *rest])
    if profile.trials:
        yield _trials(profile)


def _of_pipelines(steps: StepCosts) -> Iterator[tuple[str, str]]:
    if steps.pass_s:
        yield "a further stage", f"{1e3 * steps.pass_s:.3g} ms a microbatch, whatever it computes"
    if steps.messages_s:
        launch = f"; {1e3 * steps.launch_s:.3g} ms at each end of a transfer" if steps.launch_s else ""
        yield "ranks of a replica", f"{1e3 * steps.messages_s:.3g} ms each to tell each other of a microbatch{launch}"


def _together(profile: Profile) -> Iterator[tuple[str, str]]:
    """What processes cost each other."""
    for name, measured in profile.interference.items():
        low, high = min(measured.factors), max(measured.factors)
        yield (
            f"backbone and {name}",
            f"at once on one device: {measured.factor:.3g} of the time of one after the other ({low:.3g} to {high:.3g} "
            f"in {len(measured.factors)} rounds)",
        )
    for sharding, costs in profile.replicas.items():
        yield (
            f"two replicas, {sharding}",
            f"a microbatch {1e3 * costs.microbatch_s:.3g} ms and {1e9 * costs.microbatch_parameter_s:.3g} ns a "
            f"parameter, a step {1e3 * costs.step_s:.3g} ms and {1e9 * costs.parameter_s:.3g} ns a parameter",
        )
    for tp, attention in profile.attention.items():
        group = f", tp={tp}" if tp > 1 else ""
        yield f"attention{group}", f"{1e3 * attention.square_s * 1e6:.3g} ms a layer for a sequence of 1,000 tokens"
    if (host := profile.host) is not None:
        yield (
            "the host",
            f"{1e3 * host.sample_s:.3g} ms to feed a sample, {1e3 * host.asking_s:.3g} to ask the coordinator, "
            f"{1e3 * host.answering_s:.3g} to answer",
        )


def _trials(profile: Profile) -> Table:
    """Plans that ran, in the order in which they were tried."""
    table = Table("trials", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("measured samples/s", "predicted", "measured / predicted"):
        table.add_column(column, justify="right")
    for trial in profile.trials:
        rates = ", ".join(map(rate_text, trial.rates)) if trial.measured else "failed"
        cells = (rates, rate_text(trial.predicted), f"{trial.factor:.3f}")
        table.add_row(str(trial.plan), *cells)
    return table


def _images(name: str, profile: Profile) -> Table:
    table = _table(f"encoders.{name}, ms an image")
    (only,) = profile.encoders[name].values()
    for batch in only.batch:
        table.add_column(f"{batch} a batch", justify="right")
    for num_patches, row in zip(only.num_patches, only.seconds, strict=True):
        times = (f"{1e3 * seconds / batch:.3g}" for seconds, batch in zip(row, only.batch, strict=True))
        table.add_row(f"{num_patches:,} patches", *times)
    return table


def _lengths(profile: Profile, tp: int) -> Table:
    table = _table("backbone, ms a microbatch" + (f", tp={tp}" if tp > 1 else ""))
    for column in ("a layer", "head", "connector"):
        table.add_column(column, justify="right")
    tables = (profile.layers[tp], profile.heads[tp], profile.connectors[tp])
    for index, num_tokens in enumerate(tables[0].num_tokens):
        table.add_row(f"{num_tokens:,} tokens", *(f"{1e3 * each.seconds[index]:.3g}" for each in tables))
    return table


def _strategies(what: str, strategies: Strategies) -> Table:
    table = _table(f"{what}, {next(iter(strategies.values())).num_tokens:,} tokens")
    for column in ("ms forward and backward", "kept"):
        table.add_column(column, justify="right")
    for word, costs in strategies.items():
        table.add_row(word, f"{1e3 * costs.seconds:.3g}", nbytes_text(round(costs.kept_nbytes)))
    return table


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table
