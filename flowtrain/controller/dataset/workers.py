"""Processes that look at blocks side by side; what they find comes back in the order of the blocks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.blocks import BlockFound, BlockTask, RowChecker
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import WorkerLostError
from flowtrain.types.sources import SourceIndex

AHEAD = 4
"""Blocks that are given out ahead of their turn, for each process."""

_worker: tuple[RowChecker, SourceSet] | None = None
"""What a worker process has opened."""


def blocks_found(
    config: RunConfig, indexes: Sequence[SourceIndex], decode: bool, tasks: Sequence[BlockTask], num_workers: int
) -> Generator[BlockFound, None, None]:
    """Yield what is found in each block, in the order of ``tasks``; close the iterator to end the processes.

    Raises WorkerLostError if a process dies, and whatever a process raises.
    """
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _start_worker, (config, indexes, decode)
    )
    others = set(multiprocessing.active_children())
    ahead: deque[tuple[BlockTask, Future[BlockFound]]] = deque()
    try:
        for task in tasks:
            ahead.append((task, _submit(executor, task)))
            if len(ahead) > AHEAD * num_workers:
                yield ahead[0][1].result()
                ahead.popleft()
        while ahead:
            yield ahead[0][1].result()
            ahead.popleft()
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if isinstance(error, BrokenProcessPool | MemoryError):
            raise _lost(indexes, ahead, num_workers) from error
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _submit(executor: ProcessPoolExecutor, task: BlockTask) -> Future[BlockFound]:
    # A worker starts with Ctrl-C blocked, as its parent has it then: the parent ends its workers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(_check, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lost(
    indexes: Sequence[SourceIndex], ahead: Sequence[tuple[BlockTask, Future[BlockFound]]], num_workers: int
) -> WorkerLostError:
    files = list(dict.fromkeys(_file_of(indexes, task) for task, _ in ahead))
    return WorkerLostError(
        f"one of {num_workers} processes died, as if it was killed or ran out of memory, while they read "
        f"{', '.join(files[:3]) or 'the last file'}{' and others' if len(files) > 3 else ''}; each holds a whole "
        "block: give fewer --workers"
    )


def _file_of(indexes: Sequence[SourceIndex], task: BlockTask) -> str:
    index = indexes[task.source]
    return index.files[index.block_files[task.block]]


# --- in a worker ------------------------------------------------------------------------------------------------


def _start_worker(config: RunConfig, indexes: Sequence[SourceIndex], decode: bool) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = RowChecker(config, decode), SourceSet.from_config(config.data, indexes)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(task: BlockTask) -> BlockFound:
    assert _worker is not None
    checker, sources = _worker
    return checker.check(sources, task)
