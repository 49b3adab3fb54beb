"""Partitions and action lists to test with."""

from __future__ import annotations

from hypothesis import strategies as st

from flowtrain.pipeline.actions import Action, parse_action
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition

PLACES = ("first", "mixed", "own")


def even(pp_size: int, chunks: int = 1) -> Partition:
    """A backbone with two layers for each stage."""
    return build_partition(2 * pp_size * chunks, pp_size, chunks)


def with_encoder(
    pp_size: int, place: str, *, chunks: int = 1, is_trained: bool = False, cost: float = 1.0
) -> Partition:
    """The same with an encoder of eight layers."""
    encoder = EncoderSplit(8, place, cost, is_trained)  # type: ignore[arg-type]
    return build_partition(2 * pp_size * chunks, pp_size, chunks, encoder=encoder)


ANY_PARTITION = st.builds(even, st.integers(1, 4), st.integers(1, 3)) | st.builds(
    with_encoder,
    st.integers(1, 4),
    st.sampled_from(PLACES),
    chunks=st.integers(1, 3),
    is_trained=st.booleans(),
    cost=st.sampled_from([0.25, 1.0, 3.0]),
)


def parse_actions(text: str) -> tuple[Action, ...]:
    """One action per line; empty lines are skipped."""
    return tuple(parse_action(line.strip()) for line in text.splitlines() if line.strip())
