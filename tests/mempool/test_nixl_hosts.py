"""The pool over a real link: two network namespaces joined by veth, one process in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared.hosts import Host, NoHosts, two_hosts

from flowtrain.types.memory import Extent
from tests.mempool.network_peers import net

pytestmark = pytest.mark.processes

SIZES = [300, 70_000, 4096, 1 << 20, 999_999]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


def test_bytes_cross_the_link_both_ways(hosts: tuple[Host, Host]) -> None:
    with net() as run:
        peers = [run.owner(0, 8 << 20, hosts[0]), run.owner(4, 8 << 20, hosts[1])]
        exports = [peer.export for peer in peers]
        for peer, other, first_seed in ((peers[0], peers[1], 0), (peers[1], peers[0], 50)):
            seeds = range(first_seed, first_seed + len(SIZES))
            extents: list[tuple[Extent, ...]] = other.ask("put_many", list(zip(seeds, SIZES, strict=True)))
            assert peer.ask("read", exports, list(zip(seeds, extents, strict=True))) == []
        assert hosts[1].received_nbytes() > sum(SIZES), "what was read came over the link"
        for peer in peers:
            peer.tell("close")
            peer.process.join(30)
            assert peer.process.exitcode == 0
