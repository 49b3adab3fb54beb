"""Positions of three axes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data.positions import grid_positions

GRIDS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=4)


def layout(grids: list[tuple[int, int]], words: list[int]) -> np.ndarray:
    """Which tokens are images': words before, between and after them."""
    pieces = [[False] * words[0]]
    for (rows, columns), count in zip(grids, words[1:], strict=True):
        pieces += [[True] * (rows * columns), [False] * count]
    return np.array([each for piece in pieces for each in piece], dtype=bool)


@given(GRIDS, st.data())
def test_each_token_follows_the_one_before(grids: list[tuple[int, int]], data: st.DataObject) -> None:
    words = data.draw(st.lists(st.integers(0, 6), min_size=len(grids) + 1, max_size=len(grids) + 1))
    is_image = layout(grids, words)
    positions = grid_positions(is_image, grids)
    assert positions.shape == (3, len(is_image)) and positions.dtype == np.int32
    text = positions[:, ~is_image]
    assert (text == text[0]).all(), "text counts alike on all axes"
    position = done = 0
    for (rows, columns), before in zip(grids, words, strict=False):
        done, position = done + before, position + before
        image = positions[:, done : done + rows * columns].reshape(3, rows, columns)
        assert (image[0] == position).all()
        assert (image[1] == position + np.arange(rows)[:, None]).all()
        assert (image[2] == position + np.arange(columns)).all()
        done, position = done + rows * columns, position + max(rows, columns)
    assert (positions[:, done:] == position + np.arange(words[-1])).all()


@given(st.integers(0, 20))
def test_text_counts_from_zero(num_tokens: int) -> None:
    expected = np.broadcast_to(np.arange(num_tokens), (3, num_tokens))
    assert np.array_equal(grid_positions(np.zeros(num_tokens, dtype=bool), []), expected)


def test_an_example() -> None:
    """Two words, an image of 2 x 3 tokens, a word."""
    positions = grid_positions(np.array([0, 0, 1, 1, 1, 1, 1, 1, 0], dtype=bool), [(2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("grids", [[], [(1, 2)], [(1, 2), (1, 1), (1, 2)], [(2, 2)], [(1, 1), (1, 2)]])
def test_grids_that_do_not_fit_the_tokens_are_no_sample(grids: list[tuple[int, int]]) -> None:
    """An image is whole, and its tokens are neighbours."""
    with pytest.raises(AssertionError):
        grid_positions(np.array([1, 1, 0, 1], dtype=bool), grids)
