"""Looks at every row of a data set as a run would; no Ray."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.blocks import ROW, BlockFound, BlockTask, RowChecker
from flowtrain.controller.dataset.duplicates import MAX_LISTED, find_duplicates
from flowtrain.controller.dataset.files import FoundFiles, whole_files
from flowtrain.controller.dataset.report import DataReport, FileFault, SourceReport, Spread
from flowtrain.controller.dataset.workers import blocks_found
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.flow.units import num_steps_of
from flowtrain.types.samples import Rejection
from flowtrain.types.sources import SourceIndex

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

SPREADS = ("tokens", "vision_tokens", "target_tokens", "images", "image_nbytes")


@dataclass
class Tally:
    """What was found so far. It keeps some 60 bytes of each accepted row, and some rejected ones."""

    sources: SourceSet
    rows: list[list[npt.NDArray[np.void]]] = field(init=False)
    """Of each source, the accepted rows by block."""
    reasons: list[Counter[str]] = field(init=False)
    """Of each source, rejected rows by reason."""
    rejected: list[Rejection] = field(default_factory=list)
    faults: dict[tuple[int, str], FileFault] = field(default_factory=dict)
    """By source and file."""

    def __post_init__(self) -> None:
        num_sources = len(self.sources.all)
        self.rows = [[] for _ in range(num_sources)]
        self.reasons = [Counter() for _ in range(num_sources)]

    def add(self, found: BlockFound) -> None:
        """Count a block."""
        task = found.task
        self.rows[task.source].append(found.rows)
        self.reasons[task.source].update(row.reason.value for row in found.rejected)
        self.rejected += found.rejected[: MAX_LISTED - len(self.rejected)]
        if found.fault is None:
            return
        source = self.sources.source(task.source)
        file = source.index.files[source.index.block_files[task.block]]
        before = self.faults.get((task.source, file))
        num_rows, detail = (0, found.fault) if before is None else (before.num_rows, before.detail)
        name = self.sources.names[task.source]
        self.faults[task.source, file] = FileFault(name, file, num_rows + task.num_rows, detail)


def check_data(
    config: RunConfig,
    workers: int | None = None,
    decode: bool = False,
    sizes: Path | None = None,
    rejected: Path | None = None,
    progress: Progress | None = None,
) -> DataReport:
    """Look at every row of a run's data, and of its held-out sets those that are evaluated.

    workers: processes; None: one for each core. With one, all happens in this process.
    decode: decode images too, as encoders do.
    sizes: write the sizes of all accepted training rows there, as a CSV for ``flowtrain pack --lengths``.
    rejected: write all rows that a run would quarantine there, as JSON lines.

    Raises ConfigError; DataError if a source cannot be used at all; SourceReadError if the storage does not answer;
    WorkerLostError if a process dies.
    """
    report = progress if progress is not None else lambda what, done, total: None
    checker = RowChecker(config, decode)
    report("listing files", 0, 1)
    indexes = SourceSet.index(config.data)
    report("listing files", 1, 1)
    sources = SourceSet.from_config(config.data, indexes)
    num_evaluated = [each.max_samples for each in config.data.eval_sets.values()]
    tasks = list(block_tasks(indexes, num_evaluated))
    total, done = sum(task.num_rows for task in tasks), 0
    tally = Tally(sources)
    num_workers = min(workers or len(os.sched_getaffinity(0)), len(tasks))
    results = (
        blocks_found(config, indexes, decode, tasks, num_workers)
        if num_workers > 1
        else (checker.check(sources, task) for task in tasks)
    )
    with whole_files([sizes, rejected]) as (sizes_file, rejected_file), closing(results) as found_blocks:
        files = FoundFiles(sizes_file, rejected_file, sources.names, indexes, len(sources.train))
        for found in found_blocks:
            tally.add(found)
            files.write(found)
            done += found.task.num_rows
            report("checking rows", done, total)
    return make_report(config, decode, tally, tasks)


def block_tasks(indexes: Sequence[SourceIndex], num_evaluated: Sequence[int]) -> Iterator[BlockTask]:
    """Yield all blocks of the training sources, then those that evaluations read.

    num_evaluated: the most rows that an evaluation reads of each held-out set; they are the last of ``indexes``.
    """
    num_train = len(indexes) - len(num_evaluated)
    limits: list[int | None] = [*[None] * num_train, *num_evaluated]
    for source, (index, limit) in enumerate(zip(indexes, limits, strict=True)):
        end = index.num_rows if limit is None else min(limit, index.num_rows)
        for block, (first, after) in enumerate(zip(index.first_rows[:-1], index.first_rows[1:], strict=True)):
            if first < end:
                yield BlockTask(source, block, int(min(after, end) - first))


def make_report(config: RunConfig, decode: bool, tally: Tally, tasks: Sequence[BlockTask]) -> DataReport:
    """Summarise what was found."""
    rows = [np.concatenate([np.empty(0, ROW), *blocks]) for blocks in tally.rows]
    checked: Counter[int] = Counter()
    for task in tasks:
        checked[task.source] += task.num_rows
    unread: Counter[int] = Counter()
    for (source, _), fault in tally.faults.items():
        unread[source] += fault.num_rows
    num_train = len(tally.sources.train)
    names = tally.sources.names
    reports = tuple(
        _source_report(
            names[index],
            index >= num_train or config.data.sources[index].name is not None,
            index >= num_train,
            source.index,
            rows[index],
            tally.reasons[index],
            checked[index],
            unread[index],
        )
        for index, source in enumerate(tally.sources.all)
    )
    num_steps, total = num_steps_of(config.training, tally.sources.sizes)
    weights = np.array([source.weight for source in config.data.sources])
    shares = np.array([each.num_rejected / max(1, each.num_rows - each.num_unread) for each in reports[:num_train]])
    return DataReport(
        run=config.name,
        is_decoded=decode,
        sources=reports,
        indexes=tuple(source.index for source in tally.sources.all),
        rejected=tuple(tally.rejected),
        rejected_share=float(shares @ weights / weights.sum()),
        max_rejected_fraction=config.data.max_rejected_fraction,
        num_positions=total if total is not None else num_steps * config.training.global_batch_size,
        duplicates=find_duplicates(rows),
        faults=tuple(tally.faults.values()),
    )


def _source_report(
    name: str,
    is_named: bool,
    is_eval: bool,
    index: SourceIndex,
    rows: npt.NDArray[np.void],
    reasons: Counter[str],
    num_checked: int,
    num_unread: int,
) -> SourceReport:
    spreads = {field: Spread.of(rows[field]) for field in SPREADS}
    return SourceReport(
        name=name,
        is_named=is_named,
        is_eval=is_eval,
        num_files=len(index.files),
        num_blocks=index.num_blocks,
        nbytes=int(index.block_nbytes.sum()),
        num_rows=index.num_rows,
        num_checked=num_checked,
        num_accepted=len(rows),
        num_unread=num_unread,
        num_cut=int(rows["is_cut"].sum()),
        rejected=dict(reasons.most_common()),
        **spreads,
    )
