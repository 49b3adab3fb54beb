"""Real reads between nodes: OS processes that share only NIXL over forced TCP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowtrain.errors import OwnerLostError, PoolError
from flowtrain.mempool.transports.nixl_export import NetworkExport
from tests.mempool.network_peers import Net, Owner, net, payload

pytestmark = pytest.mark.processes

NUM_SLEEPS = 50
SIZES = (1, 255, 256, 4096, 65_537, 1 << 20)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def peers() -> Iterator[Net]:
    with net() as made:
        yield made


def test_parts_of_all_sizes_arrive_as_they_were_put(peers: Net) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    parts = owner.ask("put_many", list(enumerate(SIZES)))
    for seed, part in enumerate(parts):
        read = reader.get(part)
        assert (read == payload(seed, SIZES[seed])).all()
        assert not read.flags.writeable
    batch = reader.get_batch(parts)
    assert all((read == payload(seed, len(read))).all() for seed, read in enumerate(batch))
    assert [read.ctypes.data % 256 for read in batch] == [0] * len(SIZES), "alignment of the segment is kept"
    assert peers.num_fetches == 1


def test_a_batch_from_two_owners_lands_in_order(peers: Net) -> None:
    first, second, reader = peers.owner(0), peers.owner(4), peers.reader(8)
    sizes = [1000 * index + 7 for index in range(40)]
    parts = [first.ask("put_many", list(enumerate(sizes))), second.ask("put_many", list(enumerate(sizes, 100)))]
    for index in range(0, 40, 3):  # leaves gaps between what is read
        first.ask("release", parts[0][index])
    wanted_of = [(0, index) if index % 3 and index % 2 else (1, index) for index in reversed(range(40))]
    expected = [payload(100 * owner + index, sizes[index]) for owner, index in wanted_of]
    parts = [parts[owner][index] for owner, index in wanted_of]
    assert all((read == wanted).all() for read, wanted in zip(reader.get_batch(parts), expected, strict=True))
    destination = np.zeros(sum(map(len, expected)), np.uint8)
    reader.read_batch_into(parts, destination)
    assert (destination == np.concatenate(expected)).all()


def test_what_was_bound_after_the_start_is_read(peers: Net) -> None:
    owner, reader = peers.owner(0, nbytes=1 << 16), peers.reader(4)
    before = owner.put(1, 60_000)
    assert (reader.get(before) == payload(1, 60_000)).all()
    owner.grow(1 << 20)
    across = owner.put(2, 300_000)
    owner.grow(1 << 21)
    after = owner.put(3, 700_000)
    reads = reader.get_batch([after, before, across])
    assert [(read == payload(seed, len(read))).all() for read, seed in zip(reads, (3, 1, 2), strict=True)] == [True] * 3
    assert (reader.get(before) == payload(1, 60_000)).all()


def test_views_outlive_later_reads_and_the_pool(peers: Net) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    parts = [owner.put(seed, 100_000) for seed in range(6)]
    views = [reader.get(part) for part in parts]
    assert all((view == payload(seed, 100_000)).all() for seed, view in enumerate(views))
    addresses = {view.ctypes.data for view in views}
    assert len(addresses) == 6
    del views[1:]
    again = reader.get(parts[5])
    assert again.ctypes.data in addresses, "a buffer whose views are gone is used again"
    reader.close()
    assert (views[0] == payload(0, 100_000)).all() and (again == payload(5, 100_000)).all()


def test_batches_travel_at_once_and_one_that_is_dropped_unread_is_given_back(peers: Net) -> None:
    owner, reader = peers.owner(0, 16 << 20), peers.reader(4)
    parts = [owner.put(seed, 3 << 20) for seed in range(3)]
    batches = [reader.prefetch([part]) for part in parts]
    del batches[1]
    (last,), (first,) = batches[1].result(), batches[0].result()
    assert (first == payload(0, 3 << 20)).all() and (last == payload(2, 3 << 20)).all()
    again = reader.get(parts[1])
    assert again.ctypes.data not in {first.ctypes.data, last.ctypes.data}
    assert (again == payload(1, 3 << 20)).all() and (first == payload(0, 3 << 20)).all()
    with pytest.raises(PoolError, match="closed"):
        late = reader.prefetch([parts[0]])
        reader.close()
        late.result()


def test_an_owner_that_is_not_read_leaves_the_cores_alone(peers: Net) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    reader.get(owner.put(1, 5000))
    sleeps, ticks = _sleeps(owner), _cpu_ticks(owner)
    while _sleeps(owner) < sleeps + NUM_SLEEPS:
        # Between two sleeps its threads compute less than a tick (10 ms); one that spins never sleeps.
        assert _cpu_ticks(owner) - ticks < NUM_SLEEPS, "a thread spins"
        time.sleep(0.01)


def _cpu_ticks(owner: Owner) -> int:
    """CPU time of a process, however long that took."""
    user, system = Path(f"/proc/{owner.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _sleeps(owner: Owner) -> int:
    """How often the threads of a process gave up their core by themselves."""
    files = Path(f"/proc/{owner.process.pid}/task").glob("*/status")
    return sum(int(file.read_text().rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]) for file in files)


def test_a_killed_owner_is_lost(peers: Net) -> None:
    killed, other, reader = peers.owner(0), peers.owner(4), peers.reader(8)
    part, others = killed.put(1, 5000), other.put(2, 5000)
    assert (reader.get(part) == payload(1, 5000)).all()
    os.kill(killed.process.pid or 0, signal.SIGKILL)
    killed.process.join(20)
    for _ in range(2):  # first on the connection that was there, then on a new one
        with pytest.raises(OwnerLostError, match="segment of process 0 .* does not answer on the network"):
            reader.get_batch([others, part])
    assert (reader.get(others) == payload(2, 5000)).all()
    newcomer = peers.reader(12)
    with pytest.raises(OwnerLostError):
        newcomer.get(part)
    del peers.owners[0]
    with pytest.raises(OwnerLostError, match="does not answer on the network"):
        reader.get(part)  # asks who is left
    with pytest.raises(OwnerLostError, match="no living process exports"):
        reader.get(part)


def test_an_owner_that_hangs_is_given_up_and_its_late_bytes_do_no_harm(peers: Net) -> None:
    hanging, other, reader = peers.owner(0, 16 << 20), peers.owner(4, 16 << 20), peers.reader(8, timeout_s=3.0)
    part, others = hanging.put(1, 8 << 20), other.put(2, 8 << 20)
    reader.get(hanging.put(3, 1000))
    os.kill(hanging.process.pid or 0, signal.SIGSTOP)
    with pytest.raises(OwnerLostError, match=r"process 0 .*8388608 bytes did not arrive .*pool\.transfer_timeout_s"):
        reader.get(part)
    kept = reader.get(others)
    os.kill(hanging.process.pid or 0, signal.SIGCONT)
    for _ in range(5):
        assert (reader.get(others) == payload(2, 8 << 20)).all()
    assert (kept == payload(2, 8 << 20)).all()
    assert (reader.get(part) == payload(1, 8 << 20)).all()


def test_another_process_at_the_address_is_not_read(peers: Net) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    part = owner.put(1, 5000)
    assert owner.export.network is not None
    export = NetworkExport.from_bytes(owner.export.network)
    owner.export = replace(owner.export, network=replace(export, stamp=bytes(16)).to_bytes())
    with pytest.raises(OwnerLostError, match="another process answers at its network address"):
        reader.get(part)


def test_an_owner_without_a_network_is_named(peers: Net) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    part = owner.put(1, 5000)
    owner.export = replace(owner.export, network=None)
    with pytest.raises(PoolError, match=r"process 0 on node node-0 offers no segment.*pool\.network"):
        reader.get(part)


@pytest.mark.parametrize("how", ["close", "leave"])
def test_an_owner_ends_without_a_crash(peers: Net, how: str) -> None:
    owner, reader = peers.owner(0), peers.reader(4)
    part = owner.put(1, 1 << 20)
    view = reader.get(part)
    owner.tell(how)
    owner.process.join(30)
    assert owner.process.exitcode == 0
    assert (view == payload(1, 1 << 20)).all()
    with pytest.raises(OwnerLostError):
        reader.get(part)
