"""The code around NIXL's transfers, without a transfer: exports, runs, layout in the buffer, the error without NIXL."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import AddressError, PoolError, ResourceError
from flowtrain.mempool.page_table import Mapping
from flowtrain.mempool.transports import nixl_agent
from flowtrain.mempool.transports.nixl_agent import Agent
from flowtrain.mempool.transports.nixl_batch import LARGEST_GAP_NBYTES, lay_out
from flowtrain.mempool.transports.nixl_export import STAMP_NBYTES, NetworkExport, Piece
from flowtrain.types.memory import SegmentExport, Tier

PIECES = st.lists(st.builds(Piece, st.integers(0, 1 << 40), st.integers(1, 1000)), min_size=1, max_size=5)
RUNS = st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 3000)), min_size=1, max_size=30)
STAMP = bytes(range(STAMP_NBYTES))


@given(PIECES, st.binary(max_size=50))
def test_an_export_survives_its_wire_form(pieces: list[Piece], metadata: bytes) -> None:
    export = NetworkExport(STAMP, 123, tuple(pieces), metadata)
    assert NetworkExport.from_bytes(export.to_bytes()) == export


@pytest.mark.parametrize("data", [b"", b"ftn1", b"x" * 100])
def test_other_bytes_are_no_export(data: bytes) -> None:
    with pytest.raises(PoolError, match="no network export"):
        NetworkExport.from_bytes(data)


@given(PIECES, st.data())
def test_a_run_is_found_byte_by_byte_in_the_pieces(pieces: list[Piece], data: st.DataObject) -> None:
    export = NetworkExport(STAMP, 0, tuple(pieces), b"")
    addresses = [piece.address + index for piece in pieces for index in range(piece.nbytes)]
    offset = data.draw(st.integers(0, len(addresses) - 1))
    nbytes = data.draw(st.integers(1, len(addresses) - offset))
    found = [address + index for address, length in export.locate(offset, nbytes) for index in range(length)]
    assert found == addresses[offset : offset + nbytes]
    with pytest.raises(AddressError, match=f"offset {len(addresses) + 1} "):
        list(export.locate(offset, len(addresses) + 1 - offset))


@given(RUNS)
def test_reads_cover_all_that_is_wanted_and_only_small_gaps_in_addition(wanted: list[tuple[int, int]]) -> None:
    export = SegmentExport(0, "node", Tier.DRAM, 1, 1, 1 << 20)
    (share,) = lay_out([Mapping(export, offset, nbytes) for offset, nbytes in wanted])[0].values()
    asked = {byte for offset, nbytes in wanted for byte in range(offset, offset + nbytes)}
    held = [byte for offset, nbytes, _ in share.runs for byte in range(offset, offset + nbytes)]
    assert held == sorted(set(held)), "runs ascend and do not overlap"
    ordered = sorted(asked)
    between = {b for a, c in pairwise(ordered) if c - a - 1 <= LARGEST_GAP_NBYTES for b in range(a + 1, c)}
    assert set(held) == asked | between
    assert all(b[0] - (a[0] + a[1]) > LARGEST_GAP_NBYTES for a, b in pairwise(share.runs))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(1, 9000)), min_size=1, max_size=30))
def test_no_source_lands_on_another(wanted: list[tuple[int, int, int]]) -> None:
    exports = [SegmentExport(index, "node", Tier.DRAM, 1, 1, 1 << 20) for index in range(3)]
    sources = [Mapping(exports[index], block * 256, nbytes) for index, block, nbytes in wanted]
    shares, starts, end = lay_out(sources)
    taken = [(share.stamp_start, share.stamp_start + STAMP_NBYTES) for share in shares.values()]
    taken += [(start, start + nbytes) for share in shares.values() for _, nbytes, start in share.runs]
    taken.sort()
    assert all(a_end <= start for (_, a_end), (start, _) in pairwise(taken))
    assert taken[0][0] >= 0 and taken[-1][1] <= end
    for source, start in zip(sources, starts, strict=True):
        assert start % 256 == 0, "an extent keeps the alignment that it has in the segment"
        runs = shares[source.export.tier, source.export.process_index].runs
        ((offset, nbytes, landed),) = [run for run in runs if run[0] <= source.offset < run[0] + run[1]]
        assert start == landed + source.offset - offset, "an extent lies where its run landed"
        assert source.offset + source.nbytes <= offset + nbytes, "an extent lands in one piece"


def test_without_nixl_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "nixl_module", lambda: None)
    with pytest.raises(ResourceError, match=r"flowtrain\[nixl-cu12\].*flowtrain\[nixl-cu13\].*pool\.network: none"):
        Agent("alone", serves=False)


def test_a_setting_that_ruins_the_speed_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with caplog.at_level(logging.WARNING):
        Agent("slow", serves=False).close()
    assert "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    Agent("fast", serves=False).close()
    assert "expandable_segments" not in caplog.text
