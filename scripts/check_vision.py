"""Does a trained model look at the pictures? Its loss on held-out answers with the right picture, and with another one.

python scripts/check_vision.py runs/quickstart [--data assets/shapes/eval.parquet] [--count 128] [--json]

The answer of each held-out sample is scored with its own picture and with the next sample's. Exits with 1 unless the
other picture costs at least 0.05 nats a token more, in the mean over all pairs, and more than three standard errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from exported import ExportedModel, Sample, samples

ROOT = Path(__file__).resolve().parents[1]
MARGIN, STANDARD_ERRORS = 0.05, 3.0
"""What another picture must cost: nats a token, and multiples of the standard error of the mean."""


@dataclass(frozen=True)
class Verdict:
    """Mean losses over pairs, in nats a token. difference: wrong minus right, with its standard error."""

    num_pairs: int
    right: float
    wrong: float
    difference: float
    standard_error: float

    @property
    def sees(self) -> bool:
        """Whether the picture matters."""
        return self.difference >= MARGIN and self.difference > STANDARD_ERRORS * self.standard_error


def verdict_of(right: Sequence[float], wrong: Sequence[float]) -> Verdict:
    """Compare the losses of the same answers, in the same order."""
    if len(right) < 2:
        raise ValueError(f"{len(right)} held-out samples have one picture; at least 2 are needed")
    differences = [other - own for own, other in zip(right, wrong, strict=True)]
    error = stdev(differences) / sqrt(len(differences))
    return Verdict(len(differences), fmean(right), fmean(wrong), fmean(differences), error)


def check(model: ExportedModel, held_out: Sequence[Sample]) -> Verdict:
    """Score every answer with both pictures."""
    right = [model.answer_loss(each.image, each.question, each.answer) for each in held_out]
    others = [*held_out[1:], *held_out[:1]]
    pairs = zip(held_out, others, strict=True)
    wrong = [model.answer_loss(other.image, each.question, each.answer) for each, other in pairs]
    return verdict_of(right, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT / "assets" / "shapes" / "eval.parquet")
    parser.add_argument("--count", type=int, default=128, help="pairs at most")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    verdict = check(ExportedModel(args.run / "export"), list(islice(samples(args.data), args.count)))
    if args.json:
        print(json.dumps(asdict(verdict) | {"sees": verdict.sees}))
    else:
        print(
            f"\nheld-out loss of {verdict.num_pairs} answers: {verdict.right:.3f} with the right picture, "
            f"{verdict.wrong:.3f} with another one\n"
            f"another picture costs {verdict.difference:.3f} nats a token (standard error {verdict.standard_error:.3f})"
        )
    if not verdict.sees:
        sys.exit(
            f"the pictures do not matter: another one must cost {MARGIN} nats and {STANDARD_ERRORS:g} standard errors"
        )


if __name__ == "__main__":
    main()
