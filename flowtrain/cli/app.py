"""The command line. Torch and Ray are imported only after a command's arguments are known to be good."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import flowtrain
from flowtrain.errors import ConfigError, FlowTrainError

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="flowtrain",
    help="Train vision-language models as producer and consumer: encoders and backbone, decoupled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"flowtrain {flowtrain.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train vision-language models as producer and consumer: encoders and backbone, decoupled."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, e.g. training.max_steps=20", metavar="SECTION.KEY=VALUE", show_default=False
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="Take degrees and resources from what flowtrain plan saved.", metavar="plan.yaml"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and start nothing.")] = False,
) -> None:
    """Train what CONFIG describes; alone, or on the Ray cluster that RAY_ADDRESS names."""
    with _errors_to_exit_codes():
        from flowtrain import api
        from flowtrain.cli.tables import plan_tables, resume_table, summary_table

        if dry_run:
            report = api.dry_run(config, overrides or (), resume, plan=plan_file)
            resumption = report.resumption
            tables = [] if resumption is None else [resume_table(resumption, report.run.num_steps)]
            Console().print(*plan_tables(report.run, report.image_tokens), *tables, sep="\n")
            return
        summary = api.train(config, overrides or (), resume, plan=plan_file, loading=_loading_shown)
        Console().print(summary_table(summary), soft_wrap=True)
        if summary.stopped:
            raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def plan(
    config: Annotated[
        Path, typer.Argument(help="YAML file of a run, or a model file of configs/models.", metavar="CONFIG")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, e.g. training.global_batch_size=96", metavar="SECTION.KEY=VALUE", show_default=False
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="How many; by default as many as CONFIG's own degrees take.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            help="Of which type: h200 (the default), h100, a100, 910b, ...; several times with numbers for several "
            "types, h200=64 or h200=8x8 for 8 nodes of 8.",
            metavar="TYPE[=COUNT]",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="How many nodes they are on; by default 8 devices each.")
    ] = None,
    solver: Annotated[str, typer.Option("--solver", help="auto, highs, gurobi or cbc.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the plan, for flowtrain train --plan.", metavar="plan.yaml")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Take rates that flowtrain profile measured.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the rate over all splits.", metavar="FILE.png|FILE.svg")
    ] = None,
) -> None:
    """Find the parallel degrees that train CONFIG fastest, by data sheets or a profile; needs no cluster."""
    with _errors_to_exit_codes():
        from flowtrain.cli.plan import plan as show_plan

        asked = {"device": device or (), "devices": devices, "nodes": nodes, "profile": profile}
        show_plan(config, overrides or (), asked, solver, as_json, save, plot)


@app.command()
def profile(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, e.g. model.dtype=bfloat16", metavar="SECTION.KEY=VALUE", show_default=False
        ),
    ] = None,
    save: Annotated[
        Path, typer.Option("--save", help="Where to write it, for flowtrain plan --profile.", metavar="FILE")
    ] = Path("profile.json"),
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="How many measure side by side; by default all of a node, at most 8."),
    ] = None,
) -> None:
    """Measure CONFIG's modules on the devices there are, for flowtrain plan; on a CPU a core is a device."""
    with _errors_to_exit_codes():
        from flowtrain.cli.profile import profile as measure

        measure(config, overrides or (), save, devices)


@app.command()
def pack(
    config: Annotated[
        Path, typer.Argument(help="YAML file of a run, or a CSV of lengths to pack by the defaults.", metavar="CONFIG")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, e.g. scheduler.microbatch_tokens=8192", metavar="SECTION.KEY=VALUE", show_default=False
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="How many steps; by default 50, or all.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="By every packing method, beside the paper's.")] = False,
    lengths: Annotated[
        Path | None,
        typer.Option("--lengths", help="num_image_tiles,num_tokens: sizes to take instead of data.", metavar="CSV"),
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", help="Short for backbone.data_parallel_size=N.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Short for training.global_batch_size=N.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw it: a picture or a page.", metavar="FILE.png|FILE.html")
    ] = None,
) -> None:
    """Show what packing does to the data of CONFIG: fill, balance over ranks, cost. It reads sizes alone."""
    with _errors_to_exit_codes():
        from flowtrain.cli.pack import pack as show_packing

        short = {"backbone.data_parallel_size": dp, "training.global_batch_size": batch}
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        show_packing(config, [*given, *(overrides or ())], steps, compare, lengths, as_json, plot)


@app.command()
def doctor(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to it, e.g. pool.network=nixl", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Show what the cluster has for CONFIG: nodes, memory, transports as measured, and whether its pool fits."""
    with _errors_to_exit_codes():
        from flowtrain.cli.doctor import doctor as show_cluster

        if not show_cluster(config, overrides or (), as_json):
            raise typer.Exit(EXIT_FAILED)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under ./runs.", metavar="RUN")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to write; by default RUN/export.", metavar="DIR")
    ] = None,
) -> None:
    """Write a run's last checkpoint as a Hugging Face directory."""
    with _errors_to_exit_codes():
        run_path = _find_run(run)
        from transformers.utils import logging as transformers_logging

        from flowtrain.controller.export import export_run

        transformers_logging.disable_progress_bar()
        exported = export_run(run_path, to)
        later = "; the run is still training: export again for later steps" if exported.is_training else ""
        typer.echo(f"exported step {exported.step} to {exported.directory}{later}")


def main() -> None:
    """Entry point of the ``flowtrain`` command."""
    app()


def _find_run(run: str) -> Path:
    candidates = [Path(run).expanduser(), Path("runs") / run]
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    looked = " or ".join(str(candidate / "config.yaml") for candidate in candidates)
    raise ConfigError(f"no run {run!r}: there is no {looked}")


@contextmanager
def _loading_shown(config: RunConfig) -> Iterator[None]:
    from flowtrain.observability.progress import ProgressDisplay

    with ProgressDisplay(config.observability.progress) as display, _interrupt_exits_at_once():
        display.phase("loading libraries")
        yield


@contextmanager
def _interrupt_exits_at_once() -> Iterator[None]:
    """For the import of libraries, which was seen to swallow a KeyboardInterrupt; there is nothing to clean up yet."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
    """One message on standard error, and the exit code that says whose fault it was."""
    try:
        yield
    except FlowTrainError as error:
        typer.echo(f"flowtrain: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        typer.echo("flowtrain: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error


if __name__ == "__main__":
    main()
