"""Host memory that each backbone rank takes to build its part of a model, against building the whole model first.

python benchmarks/startup_memory.py [--dp N] [--pp N] [--tp N] [--layers N] [--hidden N] [--json]

Ranks are processes of one gloo group. Each starts once for every source of weights: `files` (several safetensors files
with an index, bfloat16), `drawn` (a configuration alone) and `whole` (the same files loaded whole on every rank, then
sliced: the baseline). The figure is the peak of the resident memory (VmHWM, reset before) above that before the build,
so it includes the skeleton and the reading.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _report import Figure, at_most, emit
from shared.text_source import TextSource
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from flowtrain.config.run import RunConfig
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.initial_weights import BuiltWeights, DrawnWeights, InitialWeights, JoinedWeights
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.stored_weights import StoredWeights
from flowtrain.models.weight_files import WeightFiles
from flowtrain.training.chunks import build_chunks
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.types.plan import Degrees

FILES, DRAWN, WHOLE = "files", "drawn", "whole"
FEATURE_DIM, SEED = 64, 7
SHARD_NBYTES = 64 << 20
SLACK_NBYTES = 24 << 20
"""Allowance of a rank in addition to shards and one tensor: modules without weights, kernels, buffers of first use."""
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Model(TextSource):
    """A Qwen3 of these sizes, and the source of its weights."""

    num_layers: int
    hidden_size: int
    directory: str
    way: str

    def language_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Build it, with random weights, on the device of the context."""
        config = Qwen3Config(
            vocab_size=16 * self.hidden_size,
            hidden_size=self.hidden_size,
            intermediate_size=4 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=self.hidden_size // 8,
            tie_word_embeddings=False,
        )
        attention = implementation_name("sdpa")
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)

    def backbone_skeleton(self) -> Backbone:
        """See ``BackboneSource``."""
        with torch.device("meta"):
            return self._backbone(self.language_model())

    def backbone_weights(self) -> InitialWeights:
        """See ``BackboneSource``."""
        if self.way == WHOLE:
            return BuiltWeights(self._load_whole)
        skeleton = self.backbone_skeleton().language_model
        language: InitialWeights = DrawnWeights(skeleton, SEED, "language")
        if self.way == FILES:
            open_files = partial(WeightFiles, self.directory, "backbone.path")
            language = StoredWeights(open_files, skeleton, language, file_vocab_size=16 * self.hidden_size)
        return JoinedWeights({"connector": BuiltWeights(self._connector), "language_model": language})

    def _connector(self) -> Connector:
        return Connector(FEATURE_DIM, self.hidden_size)

    def _backbone(self, language_model: PreTrainedModel) -> Backbone:
        return Backbone(self._connector(), language_model)

    def _load_whole(self) -> Backbone:
        kind = implementation_name("sdpa")
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32, attn_implementation=kind)
        return self._backbone(model)


@dataclass(frozen=True)
class Measured:
    """Memory of one rank, in bytes: what it holds at the end, and its peak above the memory before."""

    shards_nbytes: int
    peak_nbytes: int


def build_rank(end: Connection, rank: int, degrees: Degrees, port: int, listener: Any, model: Model) -> None:
    """Body of one rank's process."""
    torch.set_num_threads(1)
    group = init_backbone_group(rank, degrees, torch.device("cpu"), port=port, listener=listener)
    config = RunConfig.model_validate(
        {
            "name": "benchmark",
            "encoders": {"vision": {"path": "unused"}},
            "backbone": {"path": "unused"},
            "data": {"sources": [{"path": "unused"}]},
            "training": {"max_steps": 1, "global_batch_size": 1},
        }
    )
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    chunks = build_chunks(config, model, group)
    peak = resident_nbytes("VmHWM") - before
    end.send(Measured(sum(_nbytes(local_shard(tensor)) for _, tensor in chunks.named_parameters()), peak))
    group.close()


def resident_nbytes(key: str) -> int:
    """A value of this process's /proc status."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measure(degrees: Degrees, model: Model) -> list[Measured]:
    """Start the ranks, one process each, and wait for their measurements."""
    context = multiprocessing.get_context("spawn")
    listener = open_listener() if degrees.world_size > 1 else None
    port = 0 if listener is None else listener.getsockname()[1]
    processes, ends = [], []
    for rank in range(degrees.world_size):
        end, other_end = context.Pipe(duplex=False)
        arguments = (other_end, rank, degrees, port, listener if rank == 0 else None, model)
        processes.append(context.Process(target=build_rank, args=arguments))
        processes[-1].start()
        other_end.close()
        ends.append(end)
    if listener is not None:
        listener.close()
    measured = []
    for rank, end in enumerate(ends):
        if not end.poll(START_TIMEOUT_S):
            raise SystemExit(f"rank {rank} did not start in {START_TIMEOUT_S} s")
        measured.append(end.recv())
    for process in processes:
        process.join(START_TIMEOUT_S)
    return measured


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest."""
    sizes = [_nbytes(parameter) for parameter in module.parameters()]
    return sum(sizes), max(sizes)


def figures_of(way: str, measured: list[Measured], whole: int, largest: int) -> Iterator[Figure]:
    """The worst rank's figures; the target is its shards, one tensor and the allowance."""
    worst = max(measured, key=lambda each: each.peak_nbytes)
    allowed = worst.shards_nbytes + largest + SLACK_NBYTES
    note = f"shards {worst.shards_nbytes / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB"
    if way == WHOLE:
        yield Figure(f"{way}/peak_above_baseline", worst.peak_nbytes / 1e6, "MB", note=note)
    else:
        yield at_most(f"{way}/peak_above_baseline", worst.peak_nbytes / 1e6, "MB", allowed / 1e6, note)
    yield Figure(f"{way}/peak_of_whole_model", worst.peak_nbytes / whole, "ratio")
    all_ranks = math.fsum(each.peak_nbytes for each in measured)
    yield Figure(f"{way}/all_ranks_of_whole_model", all_ranks / whole, "ratio", note=f"{len(measured)} ranks")


def main() -> None:
    """Parse arguments, measure each way in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dp", 1), ("pp", 2), ("tp", 2), ("layers", 8), ("hidden", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    degrees = Degrees(dp=args.dp, pp=args.pp, tp=args.tp)
    with tempfile.TemporaryDirectory() as directory:
        ways = {way: Model(args.layers, args.hidden, directory, way) for way in (FILES, DRAWN, WHOLE)}
        whole, largest = _sizes(ways[FILES].backbone_skeleton())
        ways[FILES].language_model(torch.bfloat16).save_pretrained(directory, max_shard_size=SHARD_NBYTES)
        num_files = len(list(Path(directory).glob("*.safetensors")))
        figures = [Figure("whole_model", whole / 1e6, "MB", note=f"float32; {num_files} files in bfloat16")]
        for way, model in ways.items():
            figures += figures_of(way, measure(degrees, model), whole, largest)
    emit("startup_memory", figures, args.json)


if __name__ == "__main__":
    main()
