"""What ``flowtrain data check`` finds out about a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.controller.dataset.duplicates import Duplicates, Place
from flowtrain.controller.state import MIN_SAMPLES_TO_JUDGE
from flowtrain.types.samples import Rejection
from flowtrain.types.sources import SourceIndex

CHECK_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of each row; all 0 without rows."""

    total: int
    mean: float
    p50: int
    p95: int
    max: int

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> Spread:
        """Summarise values; a percentile is one of them."""
        if not len(values):
            return cls(0, 0.0, 0, 0, 0)
        p50, p95 = np.quantile(values, [0.5, 0.95], method="inverted_cdf").tolist()
        return cls(int(values.sum(dtype=np.int64)), float(values.mean()), p50, p95, int(values.max()))


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What is known of a source."""

    name: str
    is_named: bool
    """Whether the configuration names it; if not, the name is its path."""
    is_eval: bool
    num_files: int
    num_blocks: int
    nbytes: int
    """Bytes of its blocks as stored; images that are files of their own are not in it."""
    num_rows: int
    num_checked: int
    """Rows that were looked at: all, or as many as an evaluation reads."""
    num_accepted: int
    """Rows that a run trains on, or evaluates."""
    num_unread: int
    """Rows of blocks that cannot be read."""
    num_cut: int
    """Accepted rows whose text is cut at ``data.max_seq_len``."""
    rejected: Mapping[str, int]
    """Rows that a run would quarantine, by reason."""
    tokens: Spread
    """Backbone tokens of accepted rows; the spreads below are of the same rows."""
    vision_tokens: Spread
    target_tokens: Spread
    """Tokens that bear loss."""
    images: Spread
    image_nbytes: Spread
    """Encoded."""

    @property
    def num_rejected(self) -> int:
        """Rows that a run would quarantine."""
        return sum(self.rejected.values())


@dataclass(frozen=True, slots=True)
class FileFault:
    """A file of which blocks cannot be read."""

    source: str
    file: str
    num_rows: int
    """Rows of these blocks."""
    detail: str
    """The first error."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """What a run would make of a data set."""

    run: str
    """Name of the configuration's run."""
    is_decoded: bool
    """Whether images were decoded too; else damage after a good header is not seen."""
    sources: tuple[SourceReport, ...]
    """The training sources, then the held-out sets."""
    indexes: tuple[SourceIndex, ...]
    """Their files and blocks, in the same order."""
    rejected: tuple[Rejection, ...]
    """Rows that a run would quarantine; the first ``MAX_LISTED``."""
    rejected_share: float
    """Share of the training samples that would be rejected, in the mixture's long run."""
    max_rejected_fraction: float
    """``data.max_rejected_fraction``."""
    num_positions: int
    """Training samples of the run."""
    duplicates: Duplicates
    faults: tuple[FileFault, ...]

    @property
    def num_rejected(self) -> int:
        """Rows that a run would quarantine."""
        return sum(source.num_rejected for source in self.sources)

    @property
    def num_rejected_by_reason(self) -> dict[str, int]:
        """The same by reason, most first."""
        counts: Counter[str] = Counter()
        for source in self.sources:
            counts.update(source.rejected)
        return dict(counts.most_common())

    @property
    def num_repeated(self) -> int:
        """Training rows that are the same as an earlier training row."""
        within = sum(
            self.duplicates.within.get(source, 0) for source, each in enumerate(self.sources) if not each.is_eval
        )
        across = [count for (one, _), count in self.duplicates.across.items() if not self.sources[one].is_eval]
        return within + sum(across)

    @property
    def leaked(self) -> list[tuple[Place, Place]]:
        """Those of the listed groups: held-out row, and the first training row that is the same."""
        return [
            ((source, row), group[0])
            for group in self.duplicates.groups
            for source, row in group
            if self.sources[source].is_eval and not self.sources[group[0][0]].is_eval
        ]

    @property
    def num_leaked(self) -> int:
        """Held-out rows that are also in the training data."""
        across = self.duplicates.across.items()
        is_eval = [source.is_eval for source in self.sources]
        return sum(count for (one, other), count in across if is_eval[one] and not is_eval[other])

    @property
    def would_end(self) -> bool:
        """Whether rejected samples would end the run."""
        return self.num_positions >= MIN_SAMPLES_TO_JUDGE and self.rejected_share > self.max_rejected_fraction

    @property
    def passes(self) -> bool:
        """Whether a run would go through."""
        return not self.faults and not self.would_end

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        names = [source.name for source in self.sources]
        return {
            "schema": CHECK_SCHEMA,
            "run": self.run,
            "passes": self.passes,
            "decoded": self.is_decoded,
            "sources": [{**asdict(source), "num_rejected": source.num_rejected} for source in self.sources],
            "rejected": {
                "count": self.num_rejected,
                "by_reason": self.num_rejected_by_reason,
                "share": self.rejected_share,
                "max_share": self.max_rejected_fraction,
                "would_end": self.would_end,
                "rows": [rejected_record(names, self.indexes, row) for row in self.rejected],
            },
            "duplicates": {
                "repeated_rows": self.num_repeated,
                "leaked_rows": self.num_leaked,
                "within": [{"source": names[source], "rows": n} for source, n in self.duplicates.within.items()],
                "across": [
                    {"source": names[one], "earlier": names[other], "rows": count}
                    for (one, other), count in self.duplicates.across.items()
                ],
                "leaked": [
                    {"set": names[held_out], "row": row, "source": names[source], "source_row": source_row}
                    for (held_out, row), (source, source_row) in self.leaked
                ],
                "num_groups": self.duplicates.num_groups,
                "groups": [
                    [{"source": names[source], "row": row} for source, row in group] for group in self.duplicates.groups
                ],
            },
            "faults": [asdict(fault) for fault in self.faults],
        }


def rejected_record(names: Sequence[str], indexes: Sequence[SourceIndex], rejection: Rejection) -> dict[str, Any]:
    """Return a rejected row as plain values, named as in the quarantine file; names and indexes: of the sources."""
    file, file_row = indexes[rejection.ref.source].place_of(rejection.ref.row)
    return {
        "source": names[rejection.ref.source],
        "row": rejection.ref.row,
        "file": file,
        "file_row": file_row,
        "id": rejection.id,
        "reason": rejection.reason.value,
        "image": rejection.image,
        "path": rejection.path,
        "detail": rejection.detail,
    }
