"""How a tensor parallel group should read a microbatch's features: each rank a share, or one rank that broadcasts?

python benchmarks/group_reading.py [--images N] [--rounds N] [--json]

Features lie in the pool's shared memory, as those of SigLIP so400m in bfloat16; the group exchanges them over gloo, on
this machine. Each way is timed from a barrier until the slowest rank has all bytes, alternating with the others. A run
reads shares. If every rank read everything, the pool's owners and the network between nodes would send ``tp`` times as
much. Exits with 1 if a rank gets other bytes than were put.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from _report import Figure, at_most, emit

from flowtrain.actors.reading import share_nbytes, share_of
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, SegmentExport

ROWS, WIDTH, ROW_NBYTES = 729, 1152, 2
"""Feature rows of an image, values of a row, bytes of a value."""
NODE, ALIGNMENT = "node", 256
GROUPS = (2, 4)
Seconds = dict[str, list[float]]


def open_pool(index: int, run_id: str, space: AddressSpace, nbytes: int, exports: Sequence[SegmentExport]) -> Pool:
    """Open one process's pool. nbytes: what it gives."""
    return Pool(index, NODE, run_id, space, nbytes, ALIGNMENT, "--images", lambda: exports)


def ways(pool: Pool, extents: Sequence[Extent], rank: int, size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to get all bytes to every rank."""
    total = sum(extent.nbytes for extent in extents)
    mine, place = share_of(extents, rank, size)

    def shares() -> torch.Tensor:
        whole = torch.empty(total, dtype=torch.uint8)
        pool.read_into(mine, whole.numpy()[place])
        pieces = enumerate(whole.split(share_nbytes(total, size)))
        for work in [dist.broadcast(piece, src=source, async_op=True) for source, piece in pieces]:
            work.wait()
        return whole

    def broadcast() -> torch.Tensor:
        whole = torch.empty(total, dtype=torch.uint8)
        if rank == 0:
            pool.read_into(extents, whole.numpy())
        dist.broadcast(whole, src=0)
        return whole

    def each() -> torch.Tensor:
        whole = torch.empty(total, dtype=torch.uint8)
        pool.read_into(extents, whole.numpy())
        return whole

    return {"shares": shares, "broadcast": broadcast, "each": each}


def run_rank(
    end: Connection,
    rank: int,
    size: int,
    store: Path,
    run_id: str,
    space: AddressSpace,
    exports: Sequence[SegmentExport],
    extents: Sequence[Extent],
    rounds: int,
) -> None:
    """Time each way on one rank; sends the times and whether the bytes are right."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    shared = dist.FileStore(str(store), size)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    pool = open_pool(1 + rank, run_id, space, 0, exports)
    expected = torch.from_numpy(features(sum(extent.nbytes for extent in extents)))
    seconds: Seconds = {}
    right = True
    for number in range(rounds + 2):  # the first two warm up
        for name, read in ways(pool, extents, rank, size).items():
            dist.barrier()
            started = time.perf_counter()
            found = read()
            taken = time.perf_counter() - started
            if number >= 2:
                seconds.setdefault(name, []).append(taken)
            right &= torch.equal(found, expected)
    end.send((seconds, right))
    pool.close()
    dist.destroy_process_group()


def features(nbytes: int) -> np.ndarray:
    """The bytes of a microbatch's features."""
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def measure(size: int, num_images: int, rounds: int) -> list[Seconds]:
    """Return each rank's times in a group of ``size`` ranks."""
    part_nbytes = ROWS * WIDTH * ROW_NBYTES
    total = part_nbytes * num_images
    segment_nbytes = num_images * (part_nbytes + ALIGNMENT)
    run_id, space = f"group-reading-{os.getpid()}-{size}", AddressSpace(1 + size, 1 << segment_nbytes.bit_length())
    owner = open_pool(0, run_id, space, segment_nbytes, [])
    extents = [extent for part in np.split(features(total), num_images) for extent in owner.put(part)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(size):
            end, other_end = context.Pipe(duplex=False)
            place = (Path(folder) / "store", run_id, space, owner.exports(), extents, rounds)
            context.Process(target=run_rank, args=(other_end, rank, size, *place)).start()
            other_end.close()
            ends.append(end)
        results = [end.recv() for end in ends]
        for process in multiprocessing.active_children():
            process.join()
    owner.close()
    if not all(right for _, right in results):
        sys.exit("a rank got other bytes than were put")
    return [seconds for seconds, _ in results]


def figures(size: int, num_images: int, rounds: int) -> list[Figure]:
    """The median of the slowest rank for each way, and the shares over the broadcast."""
    ranks = measure(size, num_images, rounds)
    nbytes = ROWS * WIDTH * ROW_NBYTES * num_images
    slowest = {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    found = []
    for name, times in slowest.items():
        read = size if name == "each" else 1
        note = f"{nbytes / 1e6:.1f} MB, sent {read}x by the pool; {1e3 * min(times):.2f} to {1e3 * max(times):.2f}"
        found.append(Figure(f"tp_{size}.{name}", 1e3 * median(times), "ms", note=note))
    ratio = median(ours / theirs for ours, theirs in zip(slowest["shares"], slowest["broadcast"], strict=True))
    return [*found, at_most(f"tp_{size}.shares_over_broadcast", ratio, "1", 1.0, "runs read shares")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    emit("group_reading", [each for size in GROUPS for each in figures(size, args.images, args.rounds)], args.json)


if __name__ == "__main__":
    main()
