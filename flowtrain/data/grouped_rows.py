"""The order of a source's rows under ``data.grouping``: group after group, other groups in each epoch."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass

import numpy as np

from flowtrain.config.home import expanded
from flowtrain.costs.flops import IntArray
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.scheduler.grouping import isf_groups
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.packing.isf import isf_quotas

_KEY = "data.grouping.sizes"
_COLUMNS = ("row", "num_tokens", "num_vision_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """Sizes of a source's rows, as ``flowtrain data check --sizes`` keeps them."""

    num_rows: int
    rows: IntArray
    """Rows that have a size; the others are rejected when they are read."""
    lengths: Lengths
    """Of ``rows``; vision work is in vision tokens."""

    @classmethod
    def read(cls, path: str, num_rows: int, capacity: int) -> GroupedRows:
        """Read the CSV of a source with ``num_rows`` rows. capacity: the most tokens of a row.

        Raises ConfigError if it cannot be read, or is of other data.
        """
        try:
            with expanded(path).open(newline="", encoding="utf-8-sig") as file:
                table = csv.DictReader(file)
                missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
                if missing:
                    raise _refused(path, f"has no column {missing[0]}; write it by flowtrain data check --sizes")
                found = np.array([[int(row[name]) for name in _COLUMNS] for row in table], dtype=np.int64)
        except (OSError, ValueError, UnicodeDecodeError, csv.Error) as error:
            if isinstance(error, ConfigError):
                raise
            raise _refused(path, f"cannot be read ({error})") from error
        if not len(found):
            raise _refused(path, "has no rows; write it by flowtrain data check --sizes")
        rows, tokens, vision = found.T
        if len(np.unique(rows)) != len(rows) or rows.min() < 0 or rows.max() >= num_rows:
            raise _refused(
                path,
                f"has {len(rows)} rows from {rows.min()} to {rows.max()}, and the source has {num_rows} rows from 0; "
                "check the source anew by flowtrain data check --sizes",
            )
        if tokens.min() < 1 or tokens.max() > capacity:
            raise _refused(
                path,
                f"has a row of {tokens.max()} tokens, and scheduler.microbatch_tokens is {capacity}; check the source "
                "anew, or raise the second",
            )
        return cls(num_rows, rows, Lengths(np.ascontiguousarray(tokens), np.ascontiguousarray(vision)))

    def vision_quota(self, capacity: int) -> int:
        """Return the most vision tokens of a group (Q_v, OmniBal 5.2)."""
        return isf_quotas(self.lengths, capacity)[0]

    def order(self, capacity: int, vision_tokens: int | None, seed: int, epoch: int) -> IntArray:
        """Return all rows of an epoch, int64 ``[num_rows]``: groups one after another, each with its longest row first.

        vision_tokens: the most of a group; None: ``vision_quota``. Rows without a size come last.
        """
        found = isf_groups(self.lengths, capacity, _epoch_seed(seed, epoch), vision_quota=vision_tokens)
        number = np.repeat(np.arange(len(found)), np.diff(found.offsets))
        order = np.lexsort((-self.lengths.tokens[found.members], number))
        grouped = self.rows[found.members[order]]
        return np.concatenate([grouped, np.setdiff1d(np.arange(self.num_rows), self.rows)])


@dataclass(frozen=True, slots=True)
class GroupedOrder:
    """The orders of a run's epochs, as its sampler asks for them.

    vision_tokens: as of ``GroupedRows.order``.
    """

    rows: GroupedRows
    capacity: int
    vision_tokens: int | None
    seed: int

    def __call__(self, epoch: int) -> IntArray:
        """As ``OrderOfEpoch``."""
        return self.rows.order(self.capacity, self.vision_tokens, self.seed, epoch)

    def digest(self) -> str:
        """As ``OrderOfEpoch``; of the sizes, and of the most tokens of a group."""
        found = hashlib.sha256(str((self.capacity, self.vision_tokens, self.rows.num_rows)).encode())
        for column in (self.rows.rows, self.rows.lengths.tokens, self.rows.lengths.vision):
            found.update(np.ascontiguousarray(column).tobytes())
        return found.hexdigest()[:16]


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _refused(path: str, reason: str) -> ConfigError:
    return ConfigError.of(_KEY, FaultCode.VALUE, f"{_KEY} ({path}) {reason}")
