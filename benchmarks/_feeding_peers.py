"""Other projects' loaders on the same samples: how fast one core delivers (image bytes, text), undecoded.

The benchmark runs this file with the interpreter that --peers-python names, so that the peers need none of FlowTrain's
environment: python _feeding_peers.py prepare|measure NAME DATA_DIRECTORY CORE. ``prepare`` writes what the peer needs
beside the common data; ``measure`` prints one JSON object. Each peer shuffles as its users do, reads from the page
cache, and works in one process: no workers.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

SHUFFLE_BUFFER = 1000
"""Samples: the default of ``datasets``, and what WebDataset's documentation shows."""
SEQUENCE_SAMPLES = 100
"""Consecutive samples that energon reads from one place before it goes to another."""
SEED = 0
INSTALL = "run scripts/install_feeding_peers.sh, and name its interpreter with --peers-python"

Delivered = Iterator[tuple[bytes, str]]


def datasets(data: Path) -> Delivered:
    """HF ``datasets``, streaming the parquet files with its shuffle buffer."""
    from datasets import Features, Image, List, Value, load_dataset

    columns = Features(
        images=List(Image(decode=False)), texts=List({"user": Value("string"), "assistant": Value("string")})
    )
    files = sorted(str(path) for path in (data / "parquet").glob("*.parquet"))
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True, features=columns)
    shuffled = rows.shuffle(seed=SEED, buffer_size=SHUFFLE_BUFFER)
    return ((row["images"][0]["bytes"], _joined(row["texts"])) for row in shuffled)


def webdataset(data: Path) -> Delivered:
    """WebDataset over the tar shards, shards and samples shuffled."""
    from webdataset import WebDataset

    shards = sorted(str(path) for path in (data / "tar").glob("*.tar"))
    samples = WebDataset(shards, shardshuffle=len(shards), seed=SEED).shuffle(SHUFFLE_BUFFER)
    return ((sample["jpg"], _text(sample["json"])) for sample in samples)


def streaming(data: Path) -> Delivered:
    """MosaicML streaming over local MDS shards, with its default shuffle."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    samples = StreamingDataset(local=str(data / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=1)
    return ((sample["image"], sample["text"]) for sample in samples)


def energon(data: Path) -> Delivered:
    """Megatron's energon over the tar shards."""
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset

    class Undecoded(DefaultTaskEncoder):
        """Samples as they are stored."""

        decoder = None

    found = get_train_dataset(
        data / "tar",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=SHUFFLE_BUFFER,
        max_samples_per_sequence=SEQUENCE_SAMPLES,
        task_encoder=Undecoded(),
        repeat=False,
    )
    return ((sample.image, _text(sample.caption)) for sample in get_loader(found))


def write_mds(data: Path) -> None:
    """Write the parquet files' samples as MDS shards."""
    import pyarrow.parquet as pq
    from streaming import MDSWriter

    if (data / "mds" / "index.json").exists():
        return
    shutil.rmtree(data / "mds", ignore_errors=True)
    with MDSWriter(out=str(data / "mds"), columns={"image": "bytes", "text": "str"}) as writer:
        for path in sorted((data / "parquet").glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    for row in file.read_row_group(group).to_pylist():
                        writer.write({"image": row["images"][0]["bytes"], "text": _joined(row["texts"])})


def index_shards(data: Path) -> None:
    """Write what energon wants to know of the tar shards."""
    if (data / "tar" / ".nv-meta" / "dataset.yaml").exists():
        return
    command = [str(Path(sys.executable).parent / "energon"), "prepare", "--non-interactive", "--no-progress"]
    command += ["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample", "--force-overwrite"]
    command += ["--field-map", '{"image": "jpg", "caption": "json"}', str(data / "tar")]
    subprocess.run(command, check=True, stdout=sys.stderr)


def nothing(data: Path) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Peer:
    """Another project's loader."""

    distribution: str
    module: str
    deliver: Callable[[Path], Delivered]
    prepare: Callable[[Path], None]


PEERS = {
    "hf_datasets": Peer("datasets", "datasets", datasets, nothing),
    "webdataset": Peer("webdataset", "webdataset", webdataset, nothing),
    "mosaicml_streaming": Peer("mosaicml-streaming", "streaming", streaming, write_mds),
    "energon": Peer("megatron-energon", "megatron.energon", energon, index_shards),
}
"""By name in the figures."""


def _joined(turns: list[dict[str, str]]) -> str:
    """The conversation of a row of a parquet file."""
    return "".join(turn["user"] + turn["assistant"] for turn in turns)


def _text(encoded: bytes) -> str:
    """The conversation of a sample of a tar shard."""
    return "".join(message["content"] for message in json.loads(encoded)["messages"])


def _leave_out_collections() -> None:
    """Let ``streaming`` be imported without torchvision, which only its ready-made collections of data need."""
    for name in ("multimodal", "text", "vision"):
        sys.modules[f"streaming.{name}"] = ModuleType(f"streaming.{name}")


def measure(peer: Peer, data: Path, core: int) -> dict[str, Any]:
    """Go once through the data on one core. The peer's imports, and making its loader (``start_s``), come before."""
    os.sched_setaffinity(0, {core})
    import_module(peer.module)
    created = time.perf_counter()
    samples = peer.deliver(data)
    num_samples, image_nbytes = 0, 0
    started, started_cpu = time.perf_counter(), time.process_time()
    for image, text in samples:
        assert isinstance(image, bytes) and isinstance(text, str)
        num_samples += 1
        image_nbytes += len(image)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    peak_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "version": version(peer.distribution),
        "num_samples": num_samples,
        "image_nbytes": image_nbytes,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "start_s": started - created,
        "peak_nbytes": peak_nbytes,
    }


def ask_peer(python: str, name: str, data: Path, core: int) -> dict[str, Any] | str:
    """Run a peer with that interpreter; returns what it measured, or why it is left out."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(data / "hf")}
    for what in ("prepare", "measure"):
        command = [python, str(Path(__file__).resolve()), what, name, str(data), str(core)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            return f"{name} is left out: {last}; {INSTALL}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    what, name, data, core = sys.argv[1:]
    _leave_out_collections()
    if what == "prepare":
        PEERS[name].prepare(Path(data))
    else:
        print(json.dumps(measure(PEERS[name], Path(data), int(core))))


if __name__ == "__main__":
    main()
