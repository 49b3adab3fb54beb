"""The layers of the backbone that each pipeline stage and rank holds."""

from __future__ import annotations

from itertools import pairwise


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: contiguous runs whose lengths differ by at most one.

    Stages in the middle get the extra layers, because the first stage also embeds and the last also computes the loss.
    """
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    each, extra = divmod(num_layers, num_stages)
    first_longer = (num_stages - extra) // 2
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + each + (first_longer <= stage < first_longer + extra))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def layers_by_rank(num_layers: int, pp: int, chunks_per_rank: int = 1) -> list[int]:
    """Return the number of layers of each pipeline rank; rank r holds the stages r, r + pp, r + 2 pp and so on."""
    stages = [len(stage) for stage in split_layers(num_layers, pp * chunks_per_rank)]
    return [sum(stages[rank::pp]) for rank in range(pp)]
