"""Ray Data encodes (``map_batches``, an actor pool), a plain HF loop trains on the features; see ``_peer_job.py``.

Each training process has its share of every batch, and an encoder actor of its own that reads, decodes, tokenises and
encodes ahead. Microbatches are padded; a loss is divided by the target tokens of the whole step, over all processes.
The encoder runs as far ahead as the object store has room, here through all samples, so the whole run counts, from the
first encoded sample on. Both models have computed once before that.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import ray
from _peer_job import PeerJob, answer, read_job
from _peer_ray_actors import Trainer


def write_shares(job: PeerJob, directory: Path) -> list[Path]:
    """Write the samples of each process: microbatches in turn, as a distributed sampler gives them."""
    table, paths = pq.read_table(job.samples).slice(0, job.steps * job.batch), []
    owners = np.arange(len(table)) // job.size % job.processes
    for rank in range(job.processes):
        paths.append(directory / f"{rank}.parquet")
        pq.write_table(table.take(np.flatnonzero(owners == rank)), paths[-1])
    return paths


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    job = read_job()
    ray.init(address="local", num_cpus=3 * job.processes, include_dashboard=False, log_to_driver=False)
    actor, port = ray.remote(num_cpus=1)(Trainer), free_port()
    with tempfile.TemporaryDirectory() as directory:
        trainers = [actor.remote(job, rank, port) for rank in range(job.processes)]
        shares = write_shares(job, Path(directory))
        calls = [each.train.remote(str(path)) for each, path in zip(trainers, shares, strict=True)]
        found = ray.get(calls)
    ray.shutdown()
    ended_s, losses, _ = found[0]
    answer(ended_s, losses, ray.__version__, began_s=min(began_s for *_, began_s in found))


if __name__ == "__main__":
    main()
