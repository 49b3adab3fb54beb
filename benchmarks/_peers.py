"""TRL's and Axolotl's packers beside ours: the same lengths in, bins out.

scripts/install_packing_peers.sh puts both into a directory of their own. It goes to the end of the import path, so
whatever this environment has is taken from here, and both modules import as they are.
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
    """A packer of another project, callable as one of ours.

    prepare: brings the lengths into the form it takes and returns its call, so that the call alone can be timed.
    bins: what it returned, as bins.
    """

    name: str
    prepare: Callable[[Lengths, int], Callable[[], Any]]
    bins: Callable[[Lengths, Any], Bins]

    def __call__(self, lengths: Lengths, rules: PackingRules) -> Bins:
        return self.bins(lengths, self.prepare(lengths, rules.capacity)())


def load_peers(directory: Path) -> tuple[list[Peer], str]:
    """Return the peers that can be imported from ``directory``, and which cannot and why ("" if all can)."""
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

    (Unless ``map_kwargs`` says so, it packs 1,000 at a time, into more bins.) The rows are lists of nulls, which have a
    length and no bytes: it is timed without the tokens that it would copy and without the data set's cache files.
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
    """Return bins of samples from the lengths in them: samples of one length are the same to a packer."""
    by_length, by_place = np.argsort(tokens, kind="stable"), np.argsort(packed, kind="stable")
    assert np.array_equal(tokens[by_length], packed[by_place]), "TRL lost or changed a sample"
    number = np.empty(len(tokens), dtype=np.int64)
    number[by_length] = np.repeat(np.arange(len(counts)), counts)[by_place]
    return Bins.by_number(number, len(counts))


def _axolotl() -> Peer:
    """Multipack: what ``MultipackBatchSampler`` calls, in one process; it adds a garbage collection and regrouping.

    Its limit of samples per bin is lifted, since that only opens more bins.
    """
    from axolotl.utils.samplers.multipack import pack_parallel

    def prepare(lengths: Lengths, capacity: int) -> Callable[[], Any]:
        sizes = lengths.tokens.astype(np.int32)
        return lambda: pack_parallel(sizes, capacity, AXOLOTL_GROUP, bin_size=len(sizes), num_processes=1)

    return Peer("axolotl", prepare, lambda _, packed: Bins.of(packed))
