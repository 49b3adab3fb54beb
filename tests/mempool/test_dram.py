from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from flowtrain.errors import OwnerLostError, ResourceError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.tiers import dram, virtual_memory
from flowtrain.mempool.tiers.dram import DramRegion, DramSegment
from flowtrain.types.memory import SegmentExport, Tier
from tests.mempool.conftest import mappings

SPACE = AddressSpace(num_processes=8, segment_nbytes=1 << 20)


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return f"dram{os.getpid()}x{abs(hash(request.node.name)) % 10**8}"


@pytest.fixture
def segment(run_id: str) -> Iterator[DramSegment]:
    made = DramSegment(run_id, 3, 10_000)
    yield made
    made.close()


@pytest.fixture(params=["contiguous", "segment by segment"])
def region(run_id: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DramRegion]:
    if request.param != "contiguous":

        def forbidden(nbytes: int) -> int:
            raise OSError(12, f"no range of {nbytes} bytes here")

        monkeypatch.setattr(virtual_memory, "reserve", forbidden)
    made = DramRegion(SPACE, run_id, range(8))
    assert made.is_contiguous == (request.param == "contiguous")
    yield made
    made.close()


def export(segment: DramSegment, index: int = 3, pid: int | None = None, fd: int | None = None) -> SegmentExport:
    return SegmentExport(
        index, "n", Tier.DRAM, pid or os.getpid(), segment.fd if fd is None else fd, len(segment.array)
    )


def test_a_view_shows_what_the_owner_writes_later_and_cannot_be_written(
    segment: DramSegment, region: DramRegion
) -> None:
    view = region.view(export(segment), 100, 50)
    segment.array[100:150] = np.arange(50)
    assert (view == np.arange(50)).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_segments_lie_at_their_place_in_one_range(run_id: str) -> None:
    region = DramRegion(SPACE, run_id, range(2, 6))
    segments = {index: DramSegment(run_id, index, 8192) for index in (2, 5)}
    address = {
        index: region.view(export(segment, index), 0, 1).__array_interface__["data"][0]
        for index, segment in segments.items()
    }
    assert address[5] - address[2] == 3 * SPACE.segment_nbytes
    for segment in segments.values():
        segment.close()
    region.close()


def test_growth_keeps_old_views_and_shows_new_bytes(segment: DramSegment, region: DramRegion) -> None:
    segment.array[:] = 7
    own, old = segment.array[:10], region.view(export(segment), 0, 10_000)
    segment.grow(50_000)
    segment.array[10_000:] = 9
    segment.array[0] = 1
    assert own[0] == old[0] == 1 and (old[1:] == 7).all()
    assert (region.view(export(segment), 10_000, 40_000) == 9).all()


def test_a_segment_cannot_shrink_under_its_readers(segment: DramSegment) -> None:
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fd, 100)


def test_views_outlive_segment_and_region_and_then_nothing_is_mapped(run_id: str) -> None:
    segment, region = DramSegment(run_id, 3, 10_000), DramRegion(SPACE, run_id, range(8))
    segment.array[:] = 5
    own, view = segment.array[:100], region.view(export(segment), 0, 10_000)
    segment.close()
    segment.close()
    region.close()
    del segment, region
    assert len(mappings(run_id)) == 2
    assert (own == 5).all() and (view == 5).all()
    del own, view
    assert mappings(run_id) == []


def test_a_dropped_segment_goes_with_its_last_view_and_may_come_back(run_id: str) -> None:
    segment, region = DramSegment(run_id, 3, 10_000), DramRegion(SPACE, run_id, range(8))
    segment.array[:] = 5
    view = region.view(export(segment), 0, 10)
    region.drop(3)
    again = region.view(export(segment), 0, 10)  # while a view of the first mapping lives
    del view
    assert len(mappings(run_id)) == 2 and (again == 5).all()
    region.drop(3)
    segment.close()
    del segment, again
    assert mappings(run_id) == []
    assert region.is_contiguous


def test_a_closed_or_vanished_owner_is_lost(segment: DramSegment, region: DramRegion) -> None:
    gone = export(segment, pid=2**22 - 3)
    with pytest.raises(OwnerLostError, match="process 3 .* ask the coordinator"):
        region.view(gone, 0, 1)
    closed = export(segment)
    segment.close()
    with pytest.raises(OwnerLostError):
        region.view(closed, 0, 1)


def test_a_pid_or_descriptor_that_is_used_again_is_never_read(
    segment: DramSegment, region: DramRegion, run_id: str
) -> None:
    """A pid or descriptor may be used again: by another segment, another run, or a pipe that would block."""
    reader, writer = os.pipe()
    other_run = DramSegment(run_id + "other", 3, 10_000)
    try:
        for fd in (reader, writer, other_run.fd, 0):
            with pytest.raises(OwnerLostError):
                region.view(export(segment, fd=fd), 0, 1)
        with pytest.raises(OwnerLostError):
            region.view(export(segment, index=4), 0, 1)
    finally:
        os.close(reader)
        os.close(writer)
        other_run.close()


def test_a_segment_smaller_than_it_says_is_never_read(segment: DramSegment, region: DramRegion) -> None:
    lie = SegmentExport(3, "n", Tier.DRAM, os.getpid(), segment.fd, 20_000)
    with pytest.raises(OwnerLostError):
        region.view(lie, 0, 20_000)


def test_pages_are_touched_in_the_background_without_changing_them(run_id: str) -> None:
    segment = DramSegment(run_id, 0, 1 << 20)
    segment.array[:] = 3
    for toucher in segment._touchers:
        toucher.join(timeout=30)
    blocks = os.fstat(segment.fd).st_blocks * 512
    assert blocks >= 1 << 20 and (segment.array == 3).all()
    segment.close()


def test_what_is_written_while_pages_are_touched_and_joined_stays(run_id: str) -> None:
    segment = DramSegment(run_id, 0, 24 << 20)
    pattern = np.arange(1 << 20, dtype=np.uint8)
    rounds = 0
    while any(toucher.is_alive() for toucher in segment._touchers) or rounds < 2:
        for start in range(0, 24 << 20, 1 << 20):
            segment.array[start : start + (1 << 20)] = pattern + np.uint8(rounds + start // (1 << 20))
        for start in range(0, 24 << 20, 1 << 20):
            found = segment.array[start : start + (1 << 20)]
            assert np.array_equal(found, pattern + np.uint8(rounds + start // (1 << 20)))
        rounds += 1
    segment.close()


def test_segments_and_reservations_start_where_huge_pages_can(run_id: str) -> None:
    segment = DramSegment(run_id, 0, 5 << 20)
    address = segment.array.__array_interface__["data"][0]
    assert address % virtual_memory.HUGE_PAGE_NBYTES == 0
    reserved = virtual_memory.reserve(3 * virtual_memory.PAGE_NBYTES + 1)
    assert reserved % virtual_memory.HUGE_PAGE_NBYTES == 0
    virtual_memory.unmap(reserved, 4 * virtual_memory.PAGE_NBYTES)
    segment.close()


def test_a_kernel_without_huge_pages_for_shared_memory_touches_all_the_same(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(dram.virtual_memory, "join_pages", lambda address, nbytes: bool(asked.append(nbytes)))
    segment = DramSegment(run_id, 0, 20 << 20)
    for toucher in segment._touchers:
        toucher.join(timeout=30)
    assert asked == [8 << 20], "asked once and no more"
    assert os.fstat(segment.fd).st_blocks * 512 >= 20 << 20
    segment.close()


def test_close_does_not_wait_for_untouched_pages(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []

    def slowly(address: int, nbytes: int) -> bool:
        touched.append(address)
        time.sleep(0.01)
        return True

    monkeypatch.setattr(dram.virtual_memory, "populate", slowly)
    segment = DramSegment(run_id, 0, 1 << 33)  # never bound for real: nothing writes there
    segment.close()
    assert len(touched) < (1 << 33) // (8 << 20)


def test_memory_that_the_machine_refuses_is_a_resource_error(run_id: str) -> None:
    with pytest.raises(ResourceError, match=r"cannot bind 4611686018427387904 bytes"):
        DramSegment(run_id, 0, 1 << 62)
    assert mappings(run_id) == []
