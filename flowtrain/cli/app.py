"""The command line. Torch and Ray are imported only after a command's arguments have been checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import flowtrain
from flowtrain.cli import data
from flowtrain.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, errors_to_exit_codes

app = typer.Typer(
    name="flowtrain",
    help="Train vision-language models: encoders produce features, the backbone consumes them, both at their own pace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")


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
    """Train vision-language models: encoders produce features, the backbone consumes them, both at their own pace."""


@app.command()
def init(
    model: Annotated[
        str, typer.Argument(help="Checkpoint to start from: a directory, or a hub id (owner/name).", metavar="MODEL")
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Path or URL of the training data; by default a place to fill in.", metavar="PATH"),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            help="Vision tower for a MODEL that is a language model: a directory or hub id; by default a SigLIP.",
            metavar="MODEL",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to write; by default MODEL's name in this directory.", metavar="FILE.yaml"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a configuration to start from, with comments; a language model becomes the backbone of a new VLM.

    Only MODEL's configuration, tokenizer and processor are read. Models that bring code of their own are refused.
    """
    with errors_to_exit_codes():
        from flowtrain.cli.init import init as write_start

        write_start(model, data, encoder, output, force)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides, e.g. training.max_steps=20", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Use degrees and resources of a plan that flowtrain plan saved.", metavar="plan.yaml"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; start nothing.")] = False,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="With mode=auto: plan for so many devices; by default all at hand."),
    ] = None,
) -> None:
    """Train what CONFIG describes, on this machine or on the Ray cluster that RAY_ADDRESS names."""
    with errors_to_exit_codes():
        from flowtrain.cli.train import show_dry_run
        from flowtrain.cli.train import train as train_run

        if dry_run:
            show_dry_run(config, overrides or (), resume, plan_file, devices)
        elif train_run(config, overrides or (), resume, plan_file, devices).stopped:
            raise typer.Exit(EXIT_INTERRUPTED)


# What plan and simulate have in common.
PlannedConfig = Annotated[
    Path, typer.Argument(help="YAML file of a run, or a model file of configs/models.", metavar="CONFIG")
]
PlannedOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides, e.g. training.global_batch_size=96", metavar="SECTION.KEY=VALUE", show_default=False
    ),
]
PlannedDevices = Annotated[
    int | None,
    typer.Option("--devices", min=1, help="Number of devices; by default as many as CONFIG's own degrees take."),
]
PlannedNodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Number of nodes; by default as many as it takes with 8 devices each."),
]


@app.command()
def plan(
    config: PlannedConfig,
    overrides: PlannedOverrides = None,
    devices: PlannedDevices = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            help="Type of device: h200 (the default), h100, a100, 910b, ... Repeat it with counts for several types: "
            "h200=64, or h200=8x8 for 8 nodes of 8.",
            metavar="TYPE[=COUNT]",
        ),
    ] = None,
    nodes: PlannedNodes = None,
    solver: Annotated[str, typer.Option("--solver", help="MILP solver: auto, highs, gurobi or cbc.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write the plan to a file for flowtrain train --plan.", metavar="plan.yaml"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Use the rates that flowtrain profile measured.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Also draw the rate over splits of the devices, and of modes.", metavar="FILE.png|FILE.svg"
        ),
    ] = None,
) -> None:
    """Find the mode, degrees and settings that train CONFIG fastest; it needs no cluster.

    With mode: auto all modes are compared, otherwise the configured one is planned. Rates are from data sheets, or
    measured by flowtrain profile.
    """
    with errors_to_exit_codes():
        from flowtrain.cli.plan import plan as show_plan

        asked = {"device": device or (), "devices": devices, "nodes": nodes, "profile": profile}
        show_plan(config, overrides or (), asked, solver, as_json, save, plot)


@app.command()
def simulate(
    config: PlannedConfig,
    overrides: PlannedOverrides = None,
    devices: PlannedDevices = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Type of device, as for flowtrain plan.", metavar="TYPE[=COUNT]"),
    ] = None,
    nodes: PlannedNodes = None,
    mode: Annotated[str | None, typer.Option("--mode", help="Short for mode=NAME.", metavar="NAME")] = None,
    steps: Annotated[int, typer.Option("--steps", help="Least number of steps to simulate.")] = 12,
    compare: Annotated[bool, typer.Option("--compare", help="Simulate the best plan of every mode.")] = False,
    encoder_spread: Annotated[
        float, typer.Option("--encoder-spread", help="Standard deviation of an encoder's forward over its mean.")
    ] = 0.0,
    lose: Annotated[
        list[str] | None,
        typer.Option(
            "--lose",
            help="Lose a replica of an encoder, or a feeder, so many seconds after the start, for DOWN seconds (30). "
            "May be repeated.",
            metavar="MODULE@SECONDS[+DOWN]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Use the times that flowtrain profile measured.", metavar="FILE")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a step of the fastest mode as a Chrome trace.", metavar="FILE.json"),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page with the modes, a step of the fastest one and its memory.", metavar="FILE.html"
        ),
    ] = None,
) -> None:
    """Time the steps of CONFIG's best plan in virtual time; it needs no cluster and starts nothing.

    Packed batches of the real lengths run through the bookkeeping of a run's coordinator and the action lists that its
    ranks execute.
    """
    with errors_to_exit_codes():
        from flowtrain.cli.simulate import simulate as show_simulation

        asked: dict[str, Any] = {"device": device or (), "devices": devices, "nodes": nodes, "profile": profile}
        asked |= {"num_steps": steps, "compare": compare, "encoder_spread": encoder_spread, "losses": lose or ()}
        changes = [*(overrides or ()), *([f"mode={mode}"] if mode is not None else [])]
        show_simulation(config, changes, asked, as_json, trace, html)


@app.command()
def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(help="Finished runs of one model: directories, or names under runs/.", metavar="RUN..."),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="Fit the times of this profile; by default of the one that the first run was planned with.",
            metavar="FILE",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Where to write; by default the first RUN's profile.json.", metavar="FILE.json"),
    ] = None,
) -> None:
    """Fit predicted times to what the traces of RUNs have, and write them into a profile, for plan and simulate."""
    with errors_to_exit_codes():
        from flowtrain.cli.calibrate import calibrate as fit_times

        fit_times(runs, profile, save)


@app.command()
def profile(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides, e.g. model.dtype=bfloat16", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    save: Annotated[
        Path, typer.Option("--save", help="Where to write the profile for flowtrain plan --profile.", metavar="FILE")
    ] = Path("profile.json"),
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, help="Devices that measure at the same time; by default all of a node, at most 8."
        ),
    ] = None,
    trials: Annotated[
        bool,
        typer.Option(
            "--trials", help="Also run the plans that look fastest for a few steps each, of all modes with mode=auto."
        ),
    ] = False,
) -> None:
    """Measure CONFIG's modules on the available devices for flowtrain plan. On a CPU, a core is a device."""
    with errors_to_exit_codes():
        from flowtrain.cli.profile import profile as measure

        measure(config, overrides or (), save, devices, trials)


@app.command()
def pack(
    config: Annotated[
        Path,
        typer.Argument(help="YAML file of a run, or a CSV of lengths to pack with default settings.", metavar="CONFIG"),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, e.g. scheduler.microbatch_tokens=8192", metavar="SECTION.KEY=VALUE", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Number of steps; by default 50, or all if there are fewer.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show every packing method and policy, with simulated steps.")
    ] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths", help="Use these sizes instead of data; columns num_image_tiles,num_tokens.", metavar="CSV"
        ),
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", help="Short for backbone.data_parallel_size=N.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Short for training.global_batch_size=N.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw the figures, as a picture or a page.", metavar="FILE.png|FILE.html"),
    ] = None,
) -> None:
    """Show how the data of CONFIG pack: fill, balance over ranks, cost. It reads only sizes."""
    with errors_to_exit_codes():
        from flowtrain.cli.pack import pack as show_packing

        short = {"backbone.data_parallel_size": dp, "training.global_batch_size": batch}
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        show_packing(config, [*given, *(overrides or ())], steps, compare, lengths, as_json, plot)


@app.command()
def doctor(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides, e.g. pool.network=nixl", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="Check it for a plan that flowtrain plan saved.", metavar="plan.yaml"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Check the cluster for CONFIG: nodes, measured transports, and everything that its start needs."""
    with errors_to_exit_codes():
        from flowtrain.cli.doctor import doctor as show_cluster

        if not show_cluster(config, overrides or (), as_json, plan_file):
            raise typer.Exit(EXIT_FAILED)


@app.command()
def trace(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under ./runs.", metavar="RUN")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps, from the next one on.")] = 10,
    profiler: Annotated[bool, typer.Option("--profiler", help="Also run torch's profiler in these steps.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also keep the history of device memory, and write a snapshot.")
    ] = False,
) -> None:
    """Trace the next steps of a run that trains now, from another shell; no port is opened for it."""
    with errors_to_exit_codes():
        from flowtrain.cli.trace import trace as trace_run
        from flowtrain.observability.run_dir import find_run

        trace_run(find_run(run), steps, profiler, memory)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under ./runs.", metavar="RUN")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to write; by default RUN/export.", metavar="DIR")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", help="Type of the weights; float32 is what was trained."),
    ] = "float32",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by checkpoint.keep_best.")] = False,
) -> None:
    """Write a run's last checkpoint as a Hugging Face directory."""
    with errors_to_exit_codes():
        from flowtrain.observability.run_dir import find_run

        run_path = find_run(run)
        from transformers.utils import logging as transformers_logging

        from flowtrain import api

        transformers_logging.disable_progress_bar()
        exported = api.export(run_path, to, dtype=dtype, best=best)
        later = "; the run is still training: export again for later steps" if exported.is_training else ""
        typer.echo(f"exported step {exported.step} to {exported.directory}{later}")


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Directories of runs, or names under ./runs.", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="File to write; by default RUN/report.html, of several runs comparison.html.",
            metavar="FILE.html",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", help="Steps of the timeline; by default three from the middle of the trace.", metavar="N[-M]"
        ),
    ] = None,
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails/--no-thumbnails", help="Show pictures of rejected and generated samples.")
    ] = True,
) -> None:
    """Write a page about RUN, or about several side by side: one HTML file without scripts, to be read offline."""
    with errors_to_exit_codes():
        from flowtrain.cli.report import report as write

        write(runs, output, steps, thumbnails)


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under ./runs.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Show how RUN stands, also from another shell while it runs."""
    with errors_to_exit_codes():
        from flowtrain.cli.status import status as show_status

        show_status(run, as_json)


def main() -> None:
    """Entry point of the ``flowtrain`` command."""
    app()


if __name__ == "__main__":
    main()
