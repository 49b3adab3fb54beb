"""How long a configuration that is refused takes to be refused.

python benchmarks/bad_input.py [--json]

Each kind of bad input is given to ``flowtrain.dry_run`` in this process, after one valid dry run has imported the
libraries; of ``startup`` the time from the shell is measured, imports included. Exits with 1 if one is not refused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _report import Figure, at_most, emit

import flowtrain
from flowtrain.errors import ConfigError

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
TARGET_S = 1.0
REPEATS = 3


def bomb(row: str) -> str:
    """Nine levels of nine aliases each."""
    rows = [row.format(name=number, inner=", ".join([f"*a{number - 1}"] * 9)) for number in range(1, 10)]
    return "\n".join(["a0: &a0 {x: 1}", *rows]) + "\n"


TEXTS = {
    "alias bomb": bomb("a{name}: &a{name} [{inner}]"),
    "merge bomb": bomb("a{name}: &a{name} {{<<: [{inner}], y{name}: 1}}"),
    "300,000 keys": "".join(f"k{number}: {number}\n" for number in range(300_000)),
    "10,000 values": "k:\n" + "".join(f"- {'x' * 22}\n" for _ in range(9_800)),
    "nesting of 500": "deep: " + "[" * 500 + "]" * 500 + "\n",
    "!!int abc": "seed: !!int abc\n",
}
OVERRIDES = {
    "limit .inf": "limits.stall_timeout_s=.inf",
    "~nosuchuser": "data.sources.0.path=~nosuchuser/x",
    "a layer of 100,000,000": "backbone.config.hidden_size=100_000_000",
    "an odd value for HF": "backbone.config.hidden_act=[1]",
    "an odd setting of images": "encoders.vision.image_processor={size: abc}",
}


def seconds(config: Path, overrides: tuple[str, ...]) -> float:
    """The time of one refusal; ends the program if the configuration is accepted."""
    started = time.perf_counter()
    try:
        flowtrain.dry_run(config, overrides)
    except ConfigError:
        return time.perf_counter() - started
    raise SystemExit(f"{config} {overrides} was not refused")


def figures() -> list[Figure]:
    """One figure for each kind of bad input."""
    flowtrain.dry_run(QUICKSTART)
    cases: dict[str, tuple[Path, tuple[str, ...]]] = {name: (QUICKSTART, (text,)) for name, text in OVERRIDES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(TEXTS.items()):
            file = Path(folder) / f"{number}.yaml"
            file.write_text(QUICKSTART.read_text() + text)
            cases[name] = (file, ())
        found = [
            at_most(name, max(seconds(*case) for _ in range(REPEATS)), "s", TARGET_S, f"slowest of {REPEATS}")
            for name, case in cases.items()
        ]
        command = [sys.executable, "-m", "flowtrain.cli.app", "train", str(Path(folder) / "0.yaml")]
        started = time.perf_counter()
        code = subprocess.run(command, capture_output=True).returncode
        if code != 2:
            raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
    return [*found, Figure("alias bomb from the shell", time.perf_counter() - started, "s", note="with all imports")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    emit("bad_input", figures(), parser.parse_args().json)


if __name__ == "__main__":
    main()
