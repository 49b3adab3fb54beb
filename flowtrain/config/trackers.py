"""Checks of ``observability.trackers``: their names, and that options hold no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowtrain.config.secrets import is_secret_name
from flowtrain.errors import Fault, FaultCode

NAMED_TRACKERS = ("tensorboard", "wandb", "mlflow")
_CLASS = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def tracker_faults(trackers: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Iterator[Fault]:
    """Yield what is wrong with the trackers and their options."""
    key = "observability.trackers"
    for index, name in enumerate(trackers):
        if name not in NAMED_TRACKERS and not _CLASS.fullmatch(name):
            yield Fault(
                f"{key}.{index}",
                FaultCode.VALUE,
                f"{key}.{index} = {name!r}: must be one of {', '.join(NAMED_TRACKERS)}, or a class of your own as "
                "package.module:Class",
            )
        if name in trackers[:index]:
            yield Fault(f"{key}.{index}", FaultCode.VALUE, f"{key} names {name!r} twice; take one of them out")
    for name, values in options.items():
        at = f"observability.tracker_options.{name}"
        if name not in trackers:
            yield Fault(
                at,
                FaultCode.CONFLICT,
                f"{at} is given, but {key} ({', '.join(trackers) or 'none'}) does not name {name!r}; add it there, or "
                "remove its options",
            )
        for option in filter(is_secret_name, values):
            yield Fault(
                f"{at}.{option}",
                FaultCode.VALUE,
                f"{at}.{option} looks like a secret, and the run writes its configuration down; remove it: "
                "trackers take credentials from the environment alone (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN)",
            )
