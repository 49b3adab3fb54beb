"""Representative samples of a mixture: always the same, never too long, with the given medians and means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.mixture import Mixture, Spread
from flowtrain.errors import ConfigError

SIZES = {"vision": 14}


def mixture(text: dict[str, Any], *, num_samples: int = 500, seed: int = 0, images: Any = None) -> Mixture:
    component = {"text_tokens": text, "images": {} if images is None else {"vision": images}}
    return Mixture.model_validate({"components": [component], "num_samples": num_samples, "seed": seed})


@given(
    median=st.integers(1, 400),
    factor=st.floats(1.0, 3.0),
    num_samples=st.integers(1, 300),
    seed=st.integers(0, 99),
    limit=st.integers(600, 2000),
)
def test_samples_are_as_many_as_asked_and_never_too_long(
    median: int, factor: float, num_samples: int, seed: int, limit: int
) -> None:
    images = {"count": {"median": 1, "mean": 1.5, "most": 4}, "kinds": [{"patches": 50}, {"size": [140, 140]}]}
    asked = mixture({"median": median, "mean": median * factor}, num_samples=num_samples, seed=seed, images=images)
    text, columns = asked.draw(limit, SIZES)
    count, patches = columns["vision"]
    assert len(text) == len(count) == len(patches) == num_samples
    assert text.min() >= 1 and (text + patches).max() <= limit
    assert (patches >= 50 * count).all() and (patches <= 100 * count).all()
    again = asked.draw(limit, SIZES)
    assert all(
        np.array_equal(*pair) for pair in zip((text, count, patches), (again[0], *again[1]["vision"]), strict=True)
    )


def test_a_spread_has_its_median_and_mean() -> None:
    drawn = Spread(median=362, mean=408.94).draw(np.random.default_rng(0), 20000)
    assert np.median(drawn) == pytest.approx(362, rel=0.02)
    assert drawn.mean() == pytest.approx(408.94, rel=0.02)


def test_without_a_mean_all_are_the_median() -> None:
    assert set(Spread(median=3).draw(np.random.default_rng(0), 50).tolist()) == {3}


def test_components_come_in_proportion_to_their_weights() -> None:
    short, long = ({"weight": weight, "text_tokens": {"median": size}} for weight, size in ((3, 10), (1, 90)))
    asked = Mixture.model_validate({"components": [short, long], "num_samples": 4000})
    text, columns = asked.draw(100, SIZES)
    assert (text == 10).mean() == pytest.approx(0.75, abs=0.03)
    assert not columns["vision"][0].any()


def test_other_seeds_give_other_samples() -> None:
    first, second = (mixture({"median": 50, "mean": 90}, seed=seed).draw(4096, SIZES)[0] for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_a_mixture_that_hardly_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 of 16000 drawn samples have at most workload.microbatch_tokens \(99\)"):
        mixture({"median": 100}).draw(99, SIZES)
