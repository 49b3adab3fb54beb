"""TRL's and Axolotl's packers behind FlowTrain's interface: lengths in, bins out.

scripts/install_packing_peers.sh puts both into a separate directory. That directory goes to the end of the import path,
so packages of this environment come first, and both modules are imported unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules

AXOLOTL_GROUP = 100_000
"""Samples that Axolotl packs together: the default of its ``sample_packing_group_size``."""


@dataclass(frozen=True)
class Peer:
    """A packer of another project, callable like one of FlowTrain's.

    prepare: converts the lengths to the packer's input and returns its call, so that the call alone can be timed.
    bins: converts the packer's result to bins.
    """

    name: str
    prepare: Callable[[Lengths, int], Callable[[], Any]]
    bins: Callable[[Lengths, Any], Bins]

    def __call__(self, lengths: Lengths, rules: PackingRules) -> Bins:
        return self.bins(lengths, self.prepare(lengths, rules.capacity)())


def load_peers(directory: Path) -> tuple[list[Peer], str]:
    """Return the peers that can be imported from ``directory``, and text on which cannot and why ("" if all can)."""
    install = "run scripts/install_packing_peers.sh"
    if not directory.is_dir():
        return [], f"TRL and Axolotl are left out: there is no {directory}; {install}"
    sys.path.append(str(directory.resolve()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    peers, missing = [], []
    for name, load in (("TRL", _trl), ("Axolotl", _axolotl)):
        try:
            peers.append(load())
        except ImportError as error:
            missing.append(f"{name} is left out: {error}; {install}")
    return peers, "; ".join(missing)


def _trl() -> Peer:
    """Best-fit decreasing: what ``trl.pack_dataset(..., strategy="bfd")`` maps over a data set, on all samples at once.

    (By default, without ``map_kwargs``, it packs 1,000 at a time, into more bins.) The rows are lists of nulls, which
    have a length and no bytes: the timing has no copies of tokens and no cache files of the data set.
    """
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    def prepare(lengths: Lengths, capacity: int) -> Callable[[], Any]:
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths.tokens, out=offsets[1:])
        rows = pa.LargeListArray.from_arrays(pa.array(offsets), pa.nulls(int(offsets[-1])))
        table = pa.table({"input_ids": rows})
        return lambda: _pack_bfd(table, capacity)

    def bins(lengths: Lengths, packed: Any) -> Bins:
        in_bins = packed["seq_lengths"].combine_chunks()
        return _name_samples(lengths.tokens, in_bins.flatten().to_numpy(), np.diff(in_bins.offsets.to_numpy()))

    return Peer("trl", prepare, bins)


def _name_samples(tokens: IntArray, packed: IntArray, counts: IntArray) -> Bins:
    """Return bins of samples from bins of lengths: a packer does not distinguish samples of one length."""
    by_length, by_place = np.argsort(tokens, kind="stable"), np.argsort(packed, kind="stable")
    assert np.array_equal(tokens[by_length], packed[by_place]), "TRL lost or changed a sample"
    number = np.empty(len(tokens), dtype=np.int64)
    number[by_length] = np.repeat(np.arange(len(counts)), counts)[by_place]
    return Bins.by_number(number, len(counts))


def _axolotl() -> Peer:
    """Multipack: what ``MultipackBatchSampler`` calls, in one process; that class also collects garbage and regroups.

    The limit of samples per bin is lifted, since it only opens more bins.
    """
    from axolotl.utils.samplers.multipack import pack_parallel

    def prepare(lengths: Lengths, capacity: int) -> Callable[[], Any]:
        sizes = lengths.tokens.astype(np.int32)
        return lambda: pack_parallel(sizes, capacity, AXOLOTL_GROUP, bin_size=len(sizes), num_processes=1)

    return Peer("axolotl", prepare, lambda _, packed: Bins.of(packed))
