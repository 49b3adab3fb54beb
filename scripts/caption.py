"""Print a trained model's captions of three pictures it was not trained on, and list the files of its run.

python scripts/caption.py runs/quickstart [--data assets/openclipart/eval.parquet] [--count 3]
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import AutoProcessor, LlavaForConditionalGeneration
from transformers.utils import logging


def pictures(data: Path) -> Iterator[tuple[Image.Image, str, str]]:
    """(image, question, title) of the samples with one picture whose first answer is a short title."""
    for row in pq.read_table(data).to_pylist():
        question, title = row["texts"][0]["user"], row["texts"][0]["assistant"]
        if len(row["images"]) == 1 and '"' not in question and len(title.split()) <= 5:
            yield Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB"), question, title


@torch.inference_mode()
def caption(model: LlavaForConditionalGeneration, processor: AutoProcessor, image: Image.Image, question: str) -> str:
    """The model's answer, greedily decoded."""
    content = [{"type": "image"}, {"type": "text", "text": f"\n{question}"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=end, pad_token_id=end)
    answer: str = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()


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
    parser.add_argument("--data", type=Path, default=Path("assets/openclipart/eval.parquet"))
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args()

    logging.disable_progress_bar()
    console = Console(highlight=False)
    processor = AutoProcessor.from_pretrained(args.run / "export")
    model = LlavaForConditionalGeneration.from_pretrained(args.run / "export").eval()
    table = Table("question", "title", "the model says", title="pictures it was not trained on", title_justify="left")
    for _, (image, question, title) in zip(range(args.count), pictures(args.data), strict=False):
        table.add_row(question, title, caption(model, processor, image, question))

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
