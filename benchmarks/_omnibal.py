"""OmniBal's table 3 on a trace: pad ratio, and DistRatio of the vision encoder and of the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from _contenders import DEFAULT, DP_SIZE, Outcome, check, rules_of
from _lengths import Workload
from _report import Figure, at_most

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.packing.isf import isf
from flowtrain.scheduler.summary import dist_ratio

PADDED_BATCH = 4
"""Samples in a mini-batch of the baseline: its AVE-BS in OmniBal's table 3."""


@dataclass(frozen=True)
class Row:
    """One method of the table, dealt to eight ranks."""

    method: str
    pad_ratio: float
    vision: float
    tokens: float


def omnibal_rows(workload: Workload, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """The paper's baseline, random packing, ISF over a step and over the whole data, and FlowTrain's default."""
    window = {"random": "random, packed", "isf": "isf, per step", DEFAULT.packing: "ours, per step"}
    reports = {label: outcomes[name].report for name, label in window.items()}
    rows = [
        Row(label, report.pad_ratio, report.dist_ratio_vision, report.dist_ratio_tokens)
        for label, report in reports.items()
    ]
    return [_padded(workload), rows[0], rows[1], _isf_over_all(workload), rows[2]]


def omnibal_figures(workload: Workload, rows: list[Row]) -> list[Figure]:
    """The rows, without targets."""
    found = []
    for row in rows:
        name = f"{workload.label}.omnibal.{row.method.replace(', ', '_').replace(' ', '_')}"
        found.append(Figure(f"{name}.pad_ratio", row.pad_ratio, "1"))
        found.append(Figure(f"{name}.dist_ratio_vision", row.vision, "1"))
        found.append(Figure(f"{name}.dist_ratio_tokens", row.tokens, "1"))
    return found


def omnibal_against_isf(workload: Workload, rows: list[Row]) -> list[Figure]:
    """How far FlowTrain's default is above each ISF, for the vision encoder and for the language model."""
    ours, found = rows[-1], []
    for label, isf_row in (("isf_per_step", rows[2]), ("isf_over_all", rows[3])):
        for kind in ("vision", "tokens"):
            value, other = getattr(ours, kind), getattr(isf_row, kind)
            name = f"{workload.label}.dist_ratio_{kind}_minus_{label}"
            found.append(at_most(name, value - other, "1", 0.0, f"ours {value:.4f}, ISF {other:.4f}"))
    return found


def _padded(workload: Workload) -> Row:
    """Batches of four samples as they come, each padded to its longest."""
    lengths = workload.joined()
    per_slot = PADDED_BATCH * DP_SIZE
    kept = len(lengths) - len(lengths) % per_slot
    tokens = lengths.tokens[:kept].reshape(-1, DP_SIZE, PADDED_BATCH)
    vision = lengths.vision[:kept].reshape(-1, DP_SIZE, PADDED_BATCH)
    padded = PADDED_BATCH * tokens.max(axis=2)
    share = float(np.mean((padded - tokens.sum(axis=2)) / padded))  # Eq. 1, mean over mini-batches
    return Row(f"random, padded batches of {PADDED_BATCH}", share, dist_ratio(vision.sum(axis=2)), dist_ratio(padded))


def _isf_over_all(workload: Workload) -> Row:
    """ISF over all samples at once; its groups are dealt in random order, eight at a time."""
    lengths, rules = workload.joined(), rules_of(workload.capacity)
    bins = isf(lengths, rules)
    check(f"{workload.label}, isf over all", bins, lengths, rules)
    order = np.random.default_rng(0).permutation(len(bins))
    slots: IntArray = order[: len(bins) - len(bins) % DP_SIZE].reshape(-1, DP_SIZE)
    return Row("isf, over all", 0.0, dist_ratio(bins.vision(lengths)[slots]), dist_ratio(bins.tokens(lengths)[slots]))
