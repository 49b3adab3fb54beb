from __future__ import annotations

import array
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowtrain.errors import AddressError, ConfigError, OutOfPoolMemory, OwnerLostError, PoolError
from flowtrain.mempool.pool import Data, Pool
from flowtrain.mempool.transports.base import Distance
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.types.memory import Extent, Tier
from tests.mempool.conftest import Peers, mappings

NBYTES = 1 << 16


def fill(pool: Pool, nbytes: int = 64) -> list[tuple[Extent, ...]]:
    """Put until nothing more fits."""
    parts: list[tuple[Extent, ...]] = []
    while pool.stats().free_nbytes >= nbytes:
        parts.append(pool.put(bytes([len(parts) % 256]) * nbytes))
    return parts


def fragment(pool: Pool) -> None:
    """Leave every second 64 bytes free."""
    for part in fill(pool)[::2]:
        pool.release(part)


def test_bytes_that_were_read_are_counted_by_transport(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1)
    parts = [owner.put(b"a" * 100), owner.put(b"b" * 50), reader.put(b"c" * 30)]
    reader.get_batch(parts)
    reader.read_into(parts[1], np.empty(50, np.uint8))
    assert reader.take_read_nbytes() == {"shared_memory": 200, "local": 30}
    assert reader.take_read_nbytes() == {} == owner.take_read_nbytes()


@pytest.mark.parametrize("reader", ["owner", "peer"])
def test_a_part_is_read_as_it_was_put(peers: Peers, reader: str) -> None:
    owner = peers.open(0)
    pool = owner if reader == "owner" else peers.open(1, 0)
    values = np.arange(300, dtype=np.float32).reshape(100, 3)
    extents = owner.put(values)
    read = pool.get(extents)
    assert len(extents) == 1 and extents[0].nbytes == 1200
    assert (read.view(np.float32).reshape(100, 3) == values).all()
    assert not read.flags.writeable and not read.flags.owndata


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"abc", b"abc"),
        (bytearray(b"abcd"), b"abcd"),
        (memoryview(array.array("i", [0, 1])), np.arange(2, dtype=np.int32).tobytes()),
        (np.arange(12, dtype=np.int16).reshape(3, 4).T, np.arange(12, dtype=np.int16).reshape(3, 4).T.tobytes()),
        (np.float64(2.5).reshape(()), np.float64(2.5).tobytes()),
    ],
)
def test_any_buffer_can_be_put(peers: Peers, data: Data, expected: bytes) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    assert reader.get(owner.put(data)).tobytes() == expected


def test_an_empty_part_has_no_extent_and_reads_as_nothing(peers: Peers) -> None:
    owner = peers.open(0)
    assert owner.put(np.empty((0, 8))) == ()
    assert len(owner.get(())) == 0


def test_a_part_in_pieces_is_read_as_one(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    fragment(owner)
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    extents = owner.put(data)
    assert len(extents) == 16
    assert (reader.get(extents) == data).all() and (owner.get(extents) == data).all()
    staging = np.zeros(1000, np.uint8)
    reader.read_into(extents, staging)
    assert (staging == data).all()
    assert [len(part) for part in reader.get_batch([extents, extents[:1], ()])] == [1000, 64, 0]
    for wrong in (999, 1001):
        with pytest.raises((PoolError, ValueError)):
            reader.read_into(extents, np.zeros(wrong, np.uint8))


def test_reserved_room_is_written_in_place(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    with owner.reserve(100) as room:
        room.views[0][:] = np.arange(100)
        extents = room.commit()
    assert (reader.get(extents) == np.arange(100)).all()
    with pytest.raises(PoolError, match="committed or aborted before"):
        room.abort()


def test_reserved_room_is_freed_without_commit(peers: Peers) -> None:
    owner = peers.open(0)
    before = owner.stats()
    with pytest.raises(ZeroDivisionError), owner.reserve(100):
        raise ZeroDivisionError
    owner.reserve(100).abort()
    assert owner.stats() == before


def test_promised_room_counts_as_used_and_is_there(peers: Peers) -> None:
    owner = peers.open(0)
    fragment(owner)
    free = owner.stats().free_nbytes
    hold = owner.hold(free)
    assert owner.stats().free_nbytes == 0
    with pytest.raises(OutOfPoolMemory, match=r"raise encoders\.vision\.segment_nbytes"):
        owner.put(b"x")
    with owner.reserve(free // 2, hold):
        pass  # an abort gives the room back to the promise
    owner.put(bytes(free // 2), hold)
    owner.put(bytes(free // 2), hold)
    owner.unhold(hold)
    assert owner.stats().free_nbytes == 0


def test_released_bytes_are_used_again(peers: Peers) -> None:
    owner = peers.open(0)
    extents = owner.put(bytes(NBYTES))
    with pytest.raises(OutOfPoolMemory):
        owner.put(b"x")
    owner.release(extents)
    assert owner.put(bytes(NBYTES)) == extents


def test_foreign_freed_and_impossible_extents_have_their_own_errors(peers: Peers) -> None:
    owner, other = peers.open(0), peers.open(1)
    kept, extents = owner.put(b"kept"), owner.put(b"abc")
    with pytest.raises(AddressError, match="process 1 cannot free .* belong to process 0"):
        other.release(extents)
    owner.release(extents)
    with pytest.raises(AddressError, match="freed twice"):
        owner.release([*kept, *extents])
    assert owner.get(kept).tobytes() == b"kept"
    with pytest.raises(AddressError, match="were freed"):
        owner.get(extents)
    with pytest.raises(AddressError, match=f"of which {NBYTES} bytes are bound"):
        other.get([Extent(kept[0].gva + NBYTES, 1)])
    with pytest.raises(AddressError, match="outside the pool"):
        other.get([Extent(12, 1)])


def test_the_page_table_is_fetched_only_on_a_miss(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    extents = owner.put(b"abc")
    for _ in range(5):
        reader.get(extents)
    assert peers.num_fetches == 1
    late = peers.open(2)
    assert reader.get(late.put(b"late")).tobytes() == b"late"
    assert peers.num_fetches == 2


def test_a_peers_bytes_beyond_what_it_bound_are_refused_also_when_it_was_read_before(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, nbytes=0)
    (extent,) = owner.put(b"x" * 100)
    assert reader.get([extent]).tobytes() == b"x" * 100
    bound = owner.stats().bound_nbytes
    for bad in (Extent(extent.gva, bound + 1), Extent(extent.gva + bound - 10, 20), Extent(extent.gva, 0)):
        with pytest.raises(AddressError):
            reader.get([bad])
    assert reader.get([Extent(extent.gva + bound - 10, 10)]).nbytes == 10


def test_own_bytes_that_were_freed_are_refused_also_when_they_were_read_before(peers: Peers) -> None:
    owner = peers.open(0)
    extents = owner.put(b"x" * 100)
    assert owner.get(extents).tobytes() == b"x" * 100
    owner.release(extents)
    with pytest.raises(AddressError, match="freed"):
        owner.get(extents)


def test_growth_is_learned_on_a_miss(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    first = owner.put(bytes([1]) * NBYTES)
    old = reader.get(first)
    assert owner.grow(2 * NBYTES).bound_nbytes == 2 * NBYTES
    peers.publish(0)
    assert reader.get(owner.put(bytes([2]) * NBYTES))[0] == 2
    assert (old == 1).all()
    for wrong in (NBYTES, 1 << 30):
        with pytest.raises(AddressError, match="cannot be grown"):
            owner.grow(wrong)


def test_an_owner_that_is_gone_is_lost_but_its_views_stay(peers: Peers) -> None:
    owner, reader, newcomer = peers.open(0), peers.open(1, 0), peers.open(2, 0)
    extents = owner.put(b"abc")
    view = reader.get(extents)
    owner.close()
    assert reader.get(extents).tobytes() == b"abc"  # mapped before
    with pytest.raises(OwnerLostError, match="is gone"):
        newcomer.get(extents)
    del peers.published[0]
    peers.open(3)
    reader.get(peers.pools[3].put(b"x"))  # learns that process 0 is gone
    with pytest.raises(OwnerLostError, match="ask the coordinator again by position"):
        reader.get(extents)
    assert view.tobytes() == b"abc"


def test_memory_of_a_lost_owner_goes_with_the_last_view(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(1, 0)
    view = reader.get(owner.put(b"abc"))
    owner.close()
    del peers.published[0]
    peers.open(3)
    reader.get(peers.pools[3].put(b"x"))
    assert any(f"-{peers.run_id}-0 " in line for line in mappings(peers.run_id))
    del view
    assert not any(f"-{peers.run_id}-0 " in line for line in mappings(peers.run_id))


def test_a_loss_that_is_noticed_frees_the_memory_of_all_that_are_gone(peers: Peers) -> None:
    seen, unseen, reader = peers.open(0), peers.open(2), peers.open(1, 0)
    reader.get(seen.put(b"abc"))
    never_read = unseen.put(b"abc")
    reader.prefetch([peers.open(3).put(b"x")]).result()  # knows of all three
    for pool in (seen, unseen):
        pool.close()
    del peers.published[0]
    assert any(f"-{peers.run_id}-0 " in line for line in mappings(peers.run_id))
    with pytest.raises(OwnerLostError, match="segment of process 2 .* is gone"):
        reader.get_batch([never_read])
    assert not any(f"-{peers.run_id}-0 " in line for line in mappings(peers.run_id))


def test_what_is_prefetched_is_taken_once_and_in_order(peers: Peers) -> None:
    owners, reader = [peers.open(0), peers.open(1)], peers.open(2)
    values = [np.full(10 + index, index, np.uint8) for index in range(12)]
    parts = [[*owners, reader][index % 3].put(value) for index, value in enumerate(values)]
    wanted = [5, 0, 7, 7, 11, 2]
    batch = reader.prefetch([parts[index] for index in wanted])
    assert all((read == values[index]).all() for read, index in zip(batch.result(), wanted, strict=True))
    with pytest.raises(PoolError, match="taken before"):
        batch.result()
    assert reader.prefetch([]).result() == []


def test_a_process_that_only_reads_cannot_give(peers: Peers) -> None:
    reader = peers.open(0, 0)
    assert reader.export() is None
    for act in (lambda: reader.put(b"x"), lambda: reader.hold(1), lambda: reader.reserve(1)):
        with pytest.raises(PoolError, match="it can only read"):
            act()


def test_a_closed_pool_reports_it_and_closes_twice(peers: Peers) -> None:
    owner = peers.open(0)
    extents = owner.put(b"abc")
    owner.close()
    owner.close()
    for act in (lambda: owner.put(b"x"), lambda: owner.get(extents)):
        with pytest.raises(PoolError, match="closed"):
            act()


def test_a_segment_larger_than_the_space_allows_is_refused(peers: Peers) -> None:
    with pytest.raises(ConfigError, match=r"encoders\.vision\.segment_nbytes \(16777217\).*pool\.max_segment_nbytes"):
        peers.open(0, (1 << 24) + 1)


def test_another_node_needs_a_transport_that_is_not_there(peers: Peers) -> None:
    owner, reader = peers.open(0), peers.open(9, 0, node_id="node-b", per_node=8)
    with pytest.raises(PoolError, match="dram into dram at distance other_node.*dram to dram same_node"):
        reader.get(owner.put(b"abc"))


def test_an_empty_registry_reports_that_it_has_nothing() -> None:
    with pytest.raises(PoolError, match="hbm into dram at distance same_node; this process has: none"):
        TransportRegistry().choose(Tier.HBM, Tier.DRAM, Distance.SAME_NODE)


def test_threads_share_a_pool(peers: Peers) -> None:
    owner, reader = peers.open(0, 1 << 20), peers.open(1, 0)
    start = threading.Barrier(4)

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(150):
            data = rng.integers(0, 256, int(rng.integers(1, 5000)), np.uint8)
            extents = owner.put(data)
            assert (reader.get(extents) == data).all()
            owner.release(extents)
        return 1

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) == 4
    assert owner.stats().used_nbytes == 0 and owner.stats().largest_free_nbytes == 1 << 20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 3000), max_size=40))
def test_no_part_ever_touches_another(peers: Peers, sizes: list[int]) -> None:
    owner = peers.pools.get(0) or peers.open(0, 1 << 14)
    reader = peers.pools.get(1) or peers.open(1, 0)
    rng = np.random.default_rng(len(sizes))
    live: list[tuple[tuple[Extent, ...], np.ndarray]] = []
    for nbytes in sizes:
        data = rng.integers(0, 256, nbytes, np.uint8)
        while owner.stats().free_nbytes < nbytes + 64:
            extents, _ = live.pop(int(rng.integers(len(live))))
            owner.release(extents)
        live.append((owner.put(data), data))
        for extents, expected in live:
            assert (reader.get(extents) == expected).all()
    for extents, _ in live:
        owner.release(extents)
    assert owner.stats().used_nbytes == 0
