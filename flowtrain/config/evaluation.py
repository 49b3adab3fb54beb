"""What evaluation asks of a configuration: names of held-out sets, and a metric that every checkpoint has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowtrain.errors import Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.data import EvalConfig
    from flowtrain.config.run import RunConfig

EVAL_LOSS = "eval_loss"
"""The loss over all held-out sets; that of one set has a slash and its name after it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY = "checkpoint.keep_best"


def eval_loss_of(name: str) -> str:
    """The metric that is the loss of one held-out set."""
    return f"{EVAL_LOSS}/{name}"


def eval_sets_have_names(config: RunConfig) -> Iterator[Fault]:
    """Refuse names of held-out sets that cannot be a part of file names and metrics."""
    for name in config.data.eval_sets:
        if _NAME.fullmatch(name) is None:
            yield Fault(
                f"data.eval.{name}",
                FaultCode.VALUE,
                f"data.eval: {name!r} cannot name a held-out set, since files are named after it; use letters, digits, "
                "- and _",
            )


def best_is_known(config: RunConfig) -> Iterator[Fault]:
    """Refuse a metric of the best checkpoint that no held-out set has, or that not every checkpoint has."""
    metric, sets = config.checkpoint.keep_best, config.data.eval_sets
    if metric is None:
        return
    if not sets:
        yield _fault(f"{_KEY} ({metric!r}) needs a held-out set; set data.eval, or unset {_KEY} with =null")
        return
    chosen: dict[str, tuple[EvalConfig, ...]] = {EVAL_LOSS: tuple(sets.values())}
    chosen.update((eval_loss_of(name), (each,)) for name, each in sets.items())
    if metric not in chosen:
        near = difflib.get_close_matches(metric, list(chosen), n=1, cutoff=0.0)
        yield _fault(f"{_KEY} = {metric!r}: must be one of {', '.join(sorted(chosen))}; did you mean {near[0]!r}?")
        return
    intervals = sorted({each.every_steps for each in chosen[metric]})
    if len(intervals) > 1:
        yield _fault(
            f"{_KEY} ({metric!r}) is the loss over all held-out sets, and their every_steps differ "
            f"({', '.join(map(str, intervals))}), so that it would compare different sets; make them equal, or name "
            f"one set ({eval_loss_of(next(iter(sets)))})"
        )
    elif config.checkpoint.every_steps % intervals[0]:
        yield _fault(
            f"checkpoint.every_steps ({config.checkpoint.every_steps}) is no multiple of the set's every_steps "
            f"({intervals[0]}), so that {_KEY} ({metric!r}) would know no loss of some checkpoints; change one of them"
        )


def _fault(text: str) -> Fault:
    return Fault(_KEY, FaultCode.CONFLICT, text)
