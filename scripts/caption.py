"""Print a trained model's captions of pictures it was not trained on, and list the files of its run.

python scripts/caption.py runs/quickstart [--data assets/shapes/eval.parquet] [--count 6]
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from exported import ExportedModel, samples
from rich.console import Console
from rich.table import Table


def show_losses(console: Console, metrics: Path) -> None:
    """First and last training loss, each the mean of five steps, and the last evaluation."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = (sum(s["loss"] for s in part) / len(part) for part in (steps[:5], steps[-5:]))
    console.print(f"\nloss {first:.3f} -> {last:.3f} ({last / first:.2f}x) in {steps[-1]['step']} steps")
    evaluated = [step["eval_loss"] for step in steps if step["eval_loss"] is not None]
    if evaluated:
        console.print(f"held-out loss {evaluated[0]:.3f} -> {evaluated[-1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, default=Path("assets/shapes/eval.parquet"))
    parser.add_argument("--count", type=int, default=6)
    args = parser.parse_args()

    console = Console(highlight=False)
    model = ExportedModel(args.run / "export")
    columns = ("question", "what is to be seen", "the model says")
    table = Table(*columns, title="pictures it was not trained on", title_justify="left")
    for each in islice(samples(args.data), args.count):
        table.add_row(each.question, each.answer, model.caption(each.image, each.question))

    show_losses(console, args.run / "metrics.jsonl")
    console.print(table)
    lies = Table.grid(padding=(0, 2))
    for name, what in (
        ("export", "the model, for LlavaForConditionalGeneration and AutoProcessor"),
        ("metrics.jsonl", "one line a step"),
        ("ledger.parquet", "one row a sample: its step, rank, microbatch and state"),
        ("trace.json", "what every actor did when: open it at ui.perfetto.dev"),
        ("config.yaml", "the whole configuration"),
        ("checkpoints", "for --resume"),
    ):
        if (args.run / name).exists():
            lies.add_row(str(args.run / name), what)
    console.print(lies)


if __name__ == "__main__":
    main()
