"""``flowtrain data``: looks at a data set before a run trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowtrain.cli.exit_codes import EXIT_FAILED, errors_to_exit_codes

app = typer.Typer(help="Look at the data of a run: check all of them, or show single samples.", no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, e.g. data.max_seq_len=4096", metavar="SECTION.KEY=VALUE", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Number of processes; by default as many as cores.")
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode every image too, to find damage after a good header.")
    ] = False,
    as_json: AsJson = False,
    sizes: Annotated[
        Path | None,
        typer.Option(
            "--sizes", help="Write the sizes of all samples, for flowtrain pack --lengths.", metavar="FILE.csv"
        ),
    ] = None,
    rejected: Annotated[
        Path | None,
        typer.Option("--rejected", help="Write every row that a run would quarantine.", metavar="FILE.jsonl"),
    ] = None,
) -> None:
    """Look at all rows of CONFIG's data: sizes, duplicates, what a run would quarantine; exits with 1 if it failed."""
    with errors_to_exit_codes():
        from flowtrain.cli.data_check import check as show_check

        if not show_check(config, overrides or (), workers, decode, as_json, sizes, rejected):
            raise typer.Exit(EXIT_FAILED)


@app.command()
def show(
    config: Config,
    row: Annotated[
        list[int], typer.Option("--row", min=0, help="Row of the source, from 0; repeat it for several.", metavar="N")
    ],
    overrides: Overrides = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Name or number of the source; needed if there are several.", metavar="NAME"),
    ] = None,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Take the row from a held-out set; --source names it if there are several.")
    ] = False,
    save_images: Annotated[
        Path | None,
        typer.Option("--save-images", help="Write each image, as decoded and as the tower gets it.", metavar="DIR"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show samples of CONFIG's data as the model gets them: text, tokens that bear loss, images."""
    with errors_to_exit_codes():
        from flowtrain.cli.data_show import show as show_samples

        show_samples(config, overrides or (), row, source, evaluation, save_images, as_json)
