"""Indices in the address space: node by node, never twice; only living processes are read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ResourceError
from flowtrain.flow.members import Members
from flowtrain.types.memory import SegmentExport, Tier

PER_NODE, MAX_PROCESSES = 3, 6


def export(process_index: int, tier: Tier = Tier.DRAM) -> SegmentExport:
    return SegmentExport(process_index, "node", tier, 1, 2, 64)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["n0", "n1", "n2"])), max_size=20))
def test_indices_lie_in_their_nodes_block_and_are_never_used_again(joins: list[tuple[str, str]]) -> None:
    membership = Members(max_processes=MAX_PROCESSES, processes_per_node=PER_NODE)
    nodes = list(dict.fromkeys(node for _, node in joins))
    current: dict[str, int] = {}
    used: list[int] = []
    for name, node in joins:
        place = nodes.index(node)
        full = sum(index // PER_NODE == place for index in used) == PER_NODE
        if full or place * PER_NODE >= MAX_PROCESSES:
            with pytest.raises(ResourceError, match=r"pool\.processes_per_node" if full else r"pool\.max_processes"):
                membership.join(name, node)
            continue
        index, previous = membership.join(name, node)
        assert index not in used and index // PER_NODE == place and index < MAX_PROCESSES
        assert previous == current.get(name)
        assert membership.index_of(name) == index and membership.is_living(index)
        used.append(index)
        current[name] = index


def test_an_unknown_name_has_no_index() -> None:
    assert Members(MAX_PROCESSES, PER_NODE).index_of("nobody") is None


def test_a_process_that_is_gone_is_not_read_from_and_cannot_come_back() -> None:
    membership = Members(MAX_PROCESSES, PER_NODE)
    first, _ = membership.join("encoder-0", "node")
    second, _ = membership.join("encoder-1", "node")
    for index in (first, second):
        membership.publish(export(index))
    membership.withdraw(first)
    membership.withdraw(first)
    membership.publish(export(first))  # on its way when the process died
    assert membership.exports() == (export(second),)
    assert not membership.is_living(first) and membership.is_living(second)
    assert membership.join("encoder-0", "node") == (2, first)


def test_a_process_has_a_segment_in_each_tier_and_takes_both_with_it() -> None:
    membership = Members(MAX_PROCESSES, PER_NODE)
    first, _ = membership.join("encoder-0", "node")
    second, _ = membership.join("encoder-1", "node")
    for index in (first, second):
        for tier in Tier:
            membership.publish(export(index, tier))
    assert len(membership.exports()) == 4
    membership.withdraw(first)
    assert set(membership.exports()) == {export(second, tier) for tier in Tier}
