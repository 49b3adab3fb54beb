"""``metrics.jsonl`` as columns, whatever version wrote it."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowtrain.observability.report.reading import as_count, as_list, as_number, dig
from flowtrain.observability.report.sampling import FloatArray

NUMBERS = (
    *("timestamp", "epoch", "loss", "eval_loss", "lr", "grad_norm", "num_samples", "num_tokens", "num_target_tokens"),
    *("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "backbone_mfu", "peak_flops"),
    *("starved_s", "blocked_s", "fetch_s", "read_nbytes", "plan_time_s", "plan_wait_s"),
    *("produced_samples_per_s", "consumed_samples_per_s", "num_microbatches", "packing_fill", "dp_imbalance"),
    *("pool_dram_nbytes", "pool_hbm_nbytes", "rejected", "skipped_steps", "rewound_to", "host_s"),
    *("lookahead_steps", "retries", "restarts"),
)
"""Keys whose values are numbers."""
LEARNED = frozenset({"loss", "eval_loss", "lr", "grad_norm"})
"""Those that say nothing on emulated devices, which compute nothing."""
TIERS = ("dram", "hbm")
_SOURCE = "source_losses."


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in ascending order; each column has one value a step, NaN where it is not known."""

    step: FloatArray
    columns: Mapping[str, FloatArray]
    source_losses: Mapping[str, FloatArray]
    """By source."""
    read_nbytes: Mapping[str, float]
    """Over all steps, by transport."""
    digests: tuple[str, ...]
    """Of each step's plan."""
    emulated: str | None
    """The emulated device, such as ``emulated a100``; None: devices are real. On an emulated one nothing is learned."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> FloatArray:
        """Return a column; NaN where the run does not know it."""
        found = self.columns.get(name)
        return np.full(len(self.step), np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Whether any step knows a value."""
        return bool(np.isfinite(self[name]).any())

    def last(self, name: str) -> float | None:
        """Return the last known value of a column."""
        known = self[name][np.isfinite(self[name])]
        return float(known[-1]) if len(known) else None

    @property
    def skipped(self) -> FloatArray:
        """The steps that made no update."""
        return self.step[self["skipped"] == 1]


def steps_of(records: Iterable[Mapping[str, Any]]) -> Steps:
    """Return the columns of records; of several for one step the last one counts; those without a step are left out."""
    table = _Table()
    transports: dict[str, float] = defaultdict(float)
    digests: list[str] = []
    emulated: str | None = None
    for record in records:
        step = as_count(record.get("step"))
        if step is None:
            continue
        table.append(_row(record, step))
        digests.append(str(record.get("plan_digest") or ""))
        emulated = str(record["emulated"]) if record.get("emulated") else emulated
        for name, nbytes in _items(record.get("read_nbytes_by_transport")):
            transports[name] += nbytes if math.isfinite(nbytes) else 0.0
    columns, order = table.columns()
    sources = {name.removeprefix(_SOURCE): values for name, values in columns.items() if name.startswith(_SOURCE)}
    columns = {name: values for name, values in columns.items() if not name.startswith(_SOURCE)}
    ascending = columns.pop("step", np.empty(0))
    return Steps(ascending, columns, sources, dict(transports), tuple(digests[index] for index in order), emulated)


def _items(value: object) -> Iterable[tuple[str, float]]:
    return ((str(key), as_number(item)) for key, item in value.items()) if isinstance(value, Mapping) else ()


def _row(record: Mapping[str, Any], step: int) -> dict[str, float]:
    left_out = LEARNED if record.get("emulated") else frozenset()
    row = {name: as_number(record[name]) for name in NUMBERS if record.get(name) is not None and name not in left_out}
    row["step"] = float(step)
    row["skipped"] = float(record.get("skipped") is True)
    if isinstance(record.get("spike"), bool):  # earlier versions did not say
        row["spike"] = float(record["spike"])
    for name, loss in _items(record.get("source_losses")):
        row[_SOURCE + name] = loss
    slots = [value for value in map(as_number, as_list(record.get("slot_imbalance"))) if math.isfinite(value)]
    if slots:
        row["slot_imbalance_mean"], row["slot_imbalance_max"] = sum(slots) / len(slots), max(slots)
    for part in as_list(record.get("pool")):
        tier = dig(part, "tier")
        if tier in TIERS:
            for name in ("used", "bound"):
                nbytes = as_number(dig(part, f"{name}_nbytes"))
                if math.isfinite(nbytes):
                    key = f"pool_{tier}_{name}"
                    row[key] = row.get(key, 0.0) + nbytes
    return row


class _Table:
    """Columns that grow row by row, 8 bytes a value: a run may have 100,000 steps and more."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._num_rows = 0

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; columns that it lacks get NaN."""
        for name, value in row.items():
            column = self._columns.setdefault(name, array("d"))
            self._fill(column)
            column.append(value)
        self._num_rows += 1

    def columns(self) -> tuple[dict[str, FloatArray], list[int]]:
        """Return the columns in the order of ``step``, and the row of each; the last one for a step counts."""
        found: dict[str, FloatArray] = {}
        for name, column in self._columns.items():
            self._fill(column)
            found[name] = np.array(column, np.float64)
        by_step = {int(step): index for index, step in enumerate(found.get("step", ()))}
        order = [by_step[step] for step in sorted(by_step)]
        return {name: values[order] for name, values in found.items()}, order

    def _fill(self, column: array[float]) -> None:
        if missing := self._num_rows - len(column):
            column.extend([math.nan] * missing)
