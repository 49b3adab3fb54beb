from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import AddressError, ConfigError
from flowtrain.mempool.gva import AddressSpace, Place
from flowtrain.mempool.page_table import PageTable
from flowtrain.types.memory import Extent, SegmentExport, Tier

SPACE = AddressSpace(num_processes=8, segment_nbytes=4096, hbm_base=1 << 20, dram_base=1 << 40)


@settings(deadline=None)
@given(
    tier=st.sampled_from(list(Tier)),
    num_processes=st.integers(1, 2000),
    segment_nbytes=st.integers(1, 1 << 36),
    data=st.data(),
)
def test_translation_inverts_addressing(
    tier: Tier, num_processes: int, segment_nbytes: int, data: st.DataObject
) -> None:
    space = AddressSpace(num_processes, segment_nbytes)
    process = data.draw(st.integers(0, num_processes - 1))
    offset = data.draw(st.integers(0, segment_nbytes - 1))
    gva = space.gva(tier, process, offset)
    assert 0 < gva < 1 << 64
    assert space.translate(gva) == Place(tier, process, offset)


def test_regions_are_contiguous_and_disjoint() -> None:
    for tier in Tier:
        assert space_end(0, tier) == SPACE.gva(tier, 1, 0)
    assert SPACE.translate(SPACE.hbm_base).tier is Tier.HBM
    with pytest.raises(AddressError, match="outside the pool"):
        SPACE.translate(space_end(7, Tier.HBM))


def space_end(process: int, tier: Tier) -> int:
    return SPACE.gva(tier, process, SPACE.segment_nbytes - 1) + 1


@pytest.mark.parametrize("gva", [0, -1, (1 << 20) - 1, (1 << 40) + 8 * 4096, (1 << 64) + 5])
def test_addresses_outside_both_regions_are_refused(gva: int) -> None:
    with pytest.raises(AddressError, match="outside the pool"):
        SPACE.translate(gva)


@pytest.mark.parametrize(("process", "offset"), [(8, 0), (-1, 0), (0, 4096), (0, -1)])
def test_places_that_do_not_exist_have_no_address(process: int, offset: int) -> None:
    with pytest.raises(AddressError, match="outside"):
        SPACE.gva(Tier.DRAM, process, offset)


@pytest.mark.parametrize(("offset", "nbytes"), [(4095, 2), (0, 4097), (0, 0), (10, -1)])
def test_extents_lie_in_one_segment(offset: int, nbytes: int) -> None:
    with pytest.raises(AddressError, match=rf"{nbytes} bytes .* does not lie in one segment"):
        SPACE.place(Extent(SPACE.gva(Tier.DRAM, 3, offset), nbytes))


@pytest.mark.parametrize(
    ("num_processes", "segment_nbytes", "hbm_base", "dram_base"),
    [
        (0, 1, 1, 1 << 40),
        (1 << 25, 1 << 36, 1 << 56, 1 << 60),  # the first region runs into the second
        (16, 1 << 60, 1 << 10, 1 << 62),
        (8, 4096, 0, 1 << 40),  # address zero belongs to no process
        (2, 1 << 20, 1 << 30, (1 << 64) - (1 << 20)),
    ],
)
def test_a_space_that_does_not_fit_64_bits_is_refused(
    num_processes: int, segment_nbytes: int, hbm_base: int, dram_base: int
) -> None:
    with pytest.raises(ConfigError, match=r"pool\.max_processes"):
        AddressSpace(num_processes, segment_nbytes, hbm_base, dram_base)


def export(index: int, bound: int = 1024, pid: int = 77) -> SegmentExport:
    return SegmentExport(index, "node-a", Tier.DRAM, pid, 5, bound)


def test_lookup_resolves_what_is_bound_and_misses_the_rest() -> None:
    table = PageTable(SPACE)
    table.update([export(2)])
    mapping = table.lookup(Extent(SPACE.gva(Tier.DRAM, 2, 1000), 24))
    assert mapping is not None and (mapping.export, mapping.offset, mapping.nbytes) == (export(2), 1000, 24)
    assert table.lookup(Extent(SPACE.gva(Tier.DRAM, 2, 1000), 25)) is None
    assert table.lookup(Extent(SPACE.gva(Tier.DRAM, 3, 0), 1)) is None
    assert table.lookup(Extent(SPACE.gva(Tier.HBM, 2, 0), 1)) is None
    with pytest.raises(AddressError):
        table.lookup(Extent(7, 1))


def test_update_returns_what_is_gone_and_takes_in_growth() -> None:
    table = PageTable(SPACE)
    assert table.update([export(1), export(2)]) == ()
    assert table.update([export(2, bound=2048), export(3)]) == ((Tier.DRAM, 1),)
    assert table.lookup(Extent(SPACE.gva(Tier.DRAM, 2, 1000), 25)) is not None


@pytest.mark.parametrize("again", [export(1, pid=78), export(1, bound=512)])
def test_an_index_that_another_process_uses_again_is_refused(again: SegmentExport) -> None:
    table = PageTable(SPACE)
    table.update([export(1)])
    with pytest.raises(AddressError, match="used again"):
        table.update([again])


def test_an_index_belongs_to_its_owner_after_that_is_gone() -> None:
    table = PageTable(SPACE)
    table.update([export(1)])
    table.update([])
    with pytest.raises(AddressError, match="used again: node node-a pid 77 .* pid 78"):
        table.update([export(1, pid=78)])
    assert table.lookup(Extent(SPACE.gva(Tier.DRAM, 1, 0), 8)) is None
    table.update([export(1)])
    assert table.lookup(Extent(SPACE.gva(Tier.DRAM, 1, 0), 8)) is not None


@pytest.mark.parametrize("bad", [export(8), export(1, bound=4097)])
def test_exports_outside_the_space_are_refused(bad: SegmentExport) -> None:
    with pytest.raises(AddressError):
        PageTable(SPACE).update([bad])
