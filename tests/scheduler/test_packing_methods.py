"""Each packing method against a plain version of its algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.scheduler.cost import eq3, tokens
from flowtrain.scheduler.packing.balanced import balanced
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.best_fit import best_fit
from flowtrain.scheduler.packing.best_fit_decreasing import best_fit_decreasing
from flowtrain.scheduler.packing.isf import ITERATIONS, draw_groups, isf, isf_quotas
from flowtrain.scheduler.packing.random_order import random_order
from flowtrain.scheduler.packing.sequential import sequential
from tests.scheduler.packing_problems import packing_problems

Problem = tuple[Lengths, PackingRules]
Result = list[tuple[int, ...]]


def rules_of(capacity: int, dp_size: int = 1) -> PackingRules:
    return PackingRules(capacity, eq3(capacity), dp_size)


def as_result(bins: Sequence[Sequence[int]]) -> Result:
    return [tuple(sorted(members)) for members in bins]


def linear_best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Result:
    """Look at every bin and never close one; of the tightest bins take the one that was filled last."""
    bins: list[list[int]] = []
    filled_at: list[int] = []
    for time, index in enumerate(order):
        residuals = [capacity - sum(lengths[i] for i in members) for members in bins]
        fitting = [number for number, residual in enumerate(residuals) if residual >= lengths[index]]
        number = min(fitting, key=lambda number: (residuals[number], -filled_at[number]), default=len(bins))
        if number == len(bins):
            bins.append([])
            filled_at.append(0)
        bins[number].append(index)
        filled_at[number] = time
    return as_result(bins)


def next_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Result:
    bins: list[list[int]] = []
    for index in order:
        if not bins or sum(lengths[i] for i in bins[-1]) + lengths[index] > capacity:
            bins.append([])
        bins[-1].append(index)
    return as_result(bins)


# --- best fit ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(packing_problems())
def test_best_fit_equals_a_linear_scan(problem: Problem) -> None:
    lengths, rules = problem
    expected = linear_best_fit(lengths.tokens.tolist(), range(len(lengths)), rules.capacity)
    assert list(best_fit(lengths, rules)) == expected


def test_best_fit_follows_algorithm_1() -> None:
    # 6 opens a bin (4 left), 5 opens another (5 left); 4 takes the tighter first, 5 the second, 2 opens a third.
    assert list(best_fit(Lengths.of([6, 5, 4, 5, 2]), rules_of(10))) == [(0, 2), (1, 3), (4,)]


def test_of_equally_tight_bins_the_one_filled_last_is_taken() -> None:
    assert list(best_fit(Lengths.of([7, 7, 3, 7, 3, 3]), rules_of(10))) == [(0, 5), (1, 2), (3, 4)]


@settings(deadline=None)
@given(packing_problems(max_samples=120))
def test_best_fit_decreasing_never_needs_more_bins_than_the_plain_algorithm(problem: Problem) -> None:
    lengths, rules = problem
    sizes = lengths.tokens.tolist()
    residuals: list[int] = []
    for size in sorted(sizes, reverse=True):
        residual = min((r for r in residuals if r >= size), default=rules.capacity)
        if residual in residuals:
            residuals.remove(residual)
        residuals.append(residual - size)
    assert len(best_fit_decreasing(lengths, rules)) == len(residuals)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    assert list(best_fit_decreasing(lengths, rules)) == linear_best_fit(sizes, order, rules.capacity)


# --- plain loaders -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(packing_problems())
def test_sequential_and_random_fill_one_bin_after_another(problem: Problem) -> None:
    lengths, rules = problem
    sizes = lengths.tokens.tolist()
    assert list(sequential(lengths, rules)) == next_fit(sizes, range(len(sizes)), rules.capacity)
    order = np.random.default_rng(rules.seed).permutation(len(sizes)).tolist()
    assert list(random_order(lengths, rules)) == next_fit(sizes, order, rules.capacity)


# --- balanced ----------------------------------------------------------------------------------------------------


def plain_balanced(lengths: Lengths, rules: PackingRules) -> Result:
    """PipeTune's Algorithm 1 line by line, with bins opened beforehand: the cost of every bin with every sample."""
    sizes = lengths.tokens.tolist()
    slots = -(-sum(sizes) // (rules.capacity * rules.dp_size))
    bins: list[list[int]] = [[] for _ in range(min(slots * rules.dp_size, len(sizes)))]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        target, cheapest = -1, float("inf")
        for number, members in enumerate(bins):
            together = [sizes[i] for i in (*members, index)]
            if sum(together) <= rules.capacity and rules.cost(together) < cheapest:
                target, cheapest = number, rules.cost(together)
        if target < 0:
            bins.append([])
        bins[target].append(index)
    return as_result(bins)


@settings(deadline=None)
@given(packing_problems(costs=("flops", "profile")))  # whole and dyadic numbers, so that ties do not depend on rounding
def test_balanced_equals_algorithm_1_with_bins_opened_beforehand(problem: Problem) -> None:
    lengths, rules = problem
    assert list(balanced(lengths, rules)) == plain_balanced(lengths, rules)


def test_balanced_keeps_a_multiple_of_the_ranks_where_it_fits() -> None:
    lengths = Lengths.of([4, 4, 4, 4, 1, 1, 1, 1])
    assert list(balanced(lengths, rules_of(10, dp_size=4))) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert len(balanced(lengths, rules_of(10))) == 2
    assert len(balanced(Lengths.of([4, 4]), rules_of(10, dp_size=4))) == 2, "an empty bin was left"


def test_balanced_opens_a_bin_where_none_fits() -> None:
    assert list(balanced(Lengths.of([6, 6, 6, 2]), rules_of(10))) == [(0, 3), (1,), (2,)]
    # 5 fits none of the four bins that were open; 4 goes to it, and the other 4 exactly fills one of the four.
    assert list(balanced(Lengths.of([6, 6, 6, 6, 5, 4, 4]), rules_of(10))) == [(0, 6), (1,), (2,), (3,), (4, 5)]


def test_balanced_evens_costs_out_where_best_fit_does_not() -> None:
    rng = np.random.default_rng(3)
    # No sample is so long that it alone decides a bin's cost.
    lengths, rules = Lengths.of(np.clip(rng.lognormal(6.3, 0.8, 256), 8, 2000).astype(int)), rules_of(8192, dp_size=8)
    spread = {}
    for pack in (balanced, best_fit_decreasing):
        costs = pack(lengths, rules).costs(lengths, rules.cost)
        spread[pack] = costs.max() / costs.mean() - 1.0
    assert spread[balanced] < 0.05 < spread[best_fit_decreasing]


# --- ISF ---------------------------------------------------------------------------------------------------------


def plain_isf(lengths: Lengths, q_vision: int, q_text: int, seed: int, iterations: int) -> tuple[Result, list[int]]:
    """OmniBal's Algorithm 1 line by line, for samples that no quota excludes."""
    images, text = lengths.vision.tolist(), lengths.tokens.tolist()
    rng = np.random.default_rng(seed)
    data, kept = list(range(len(lengths))), []
    for _ in range(iterations):
        candidates, filling = [], []
        for index in rng.permutation(np.array(data, dtype=np.int64)).tolist():
            filling.append(index)
            if sum(images[i] for i in filling) > q_vision or sum(text[i] for i in filling) > q_text:
                candidates.append(filling[:-1])
                filling = [index]
        for members in candidates:
            too_few_images = sum(images[i] for i in members) < q_vision
            too_short = sum(text[i] for i in members) < q_text - q_text // 32
            if not (too_few_images and too_short):
                kept.append(members)
                data = [index for index in data if index not in members]
    return as_result(kept), data


def isf_groups(
    lengths: Lengths, capacity: int, q_vision: int, q_text: int, seed: int, iterations: int = ITERATIONS
) -> tuple[Bins, np.ndarray]:
    """Full groups in the order drawn, each ascending, and the indices of the samples left over, ascending."""
    number, num_groups = draw_groups(lengths, q_vision, min(q_text, capacity), seed, iterations)
    left_first = Bins.by_number(number + 1, num_groups + 1)
    num_left = left_first.offsets[1]
    return Bins(left_first.members[num_left:], left_first.offsets[1:] - num_left), left_first.members[:num_left]


@settings(deadline=None)
@given(packing_problems(max_capacity=100), st.integers(0, 10))
def test_isf_groups_equal_algorithm_1(problem: Problem, iterations: int) -> None:
    lengths, rules = problem
    q_vision, q_text = isf_quotas(lengths, rules.capacity)
    groups, left = isf_groups(lengths, rules.capacity, q_vision, q_text, rules.seed, iterations)
    assert (list(groups), left.tolist()) == plain_isf(lengths, q_vision, q_text, rules.seed, iterations)


@settings(deadline=None)
@given(packing_problems(max_capacity=100), st.integers(1, 20), st.integers(1, 120))
def test_isf_groups_satisfy_any_quotas(problem: Problem, q_vision: int, q_text: int) -> None:
    lengths, rules = problem
    groups, left = isf_groups(lengths, rules.capacity, q_vision, q_text, rules.seed)
    images, text, most = groups.vision(lengths), groups.tokens(lengths), min(q_text, rules.capacity)
    assert (images <= q_vision).all() and (text <= most).all()
    assert ((images == q_vision) | (text >= most - most // 32)).all()
    assert sorted([*groups.members.tolist(), *left.tolist()]) == list(range(len(lengths)))
    assert left.tolist() == sorted(left.tolist())
    beyond = np.flatnonzero((lengths.vision > q_vision) | (lengths.tokens > most))
    assert set(beyond.tolist()) <= set(left.tolist())


@settings(deadline=None)
@given(packing_problems(max_capacity=100))
def test_isf_packs_its_groups_and_what_is_left_by_best_fit(problem: Problem) -> None:
    lengths, rules = problem
    groups, left = isf_groups(lengths, rules.capacity, *isf_quotas(lengths, rules.capacity), rules.seed)
    rest = best_fit(Lengths(lengths.tokens[left], lengths.vision[left]), rules)
    assert list(isf(lengths, rules)) == [*groups, *(tuple(left[list(members)].tolist()) for members in rest)]


def test_more_iterations_add_groups_and_change_none() -> None:
    rng = np.random.default_rng(2)
    images = rng.integers(0, 6, 3000)
    lengths = Lengths.of(60 + 256 * images + rng.integers(0, 300, 3000), images)
    quotas = isf_quotas(lengths, 4096)
    once, left_once = isf_groups(lengths, 4096, *quotas, seed=1, iterations=1)
    often, left_often = isf_groups(lengths, 4096, *quotas, seed=1)
    assert list(often)[: len(once)] == list(once)
    assert len(left_often) < 0.5 * len(left_once)


def test_isf_steadies_what_both_encoder_and_backbone_get() -> None:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 6, 3000)
    lengths = Lengths.of(60 + 256 * images + rng.integers(0, 300, 3000), images)
    groups, _ = isf_groups(lengths, 4096, *isf_quotas(lengths, 4096), seed=1)
    drawn = random_order(lengths, PackingRules(4096, tokens(4096), seed=1))
    for work in (lambda bins: bins.vision(lengths), lambda bins: bins.tokens(lengths)):
        assert work(groups).std() / work(groups).mean() < 0.7 * work(drawn).std() / work(drawn).mean()


def test_quotas_of_the_paper() -> None:
    # 4K tokens and 9 images (OmniBal 5.2): about 455 tokens per image.
    assert isf_quotas(Lengths.of([455, 910, 1365], [1, 2, 3]), 4096) == (9, 4096)
    # The same data with the work in patches, 1,024 per image: nine images again.
    assert isf_quotas(Lengths.of([455, 910, 1365], [1024, 2048, 3072]), 4096) == (9 * 1024, 4096)
    assert isf_quotas(Lengths.of([430, 860], [1, 2]), 4096) == (10, 4096)  # 9.5 images, to the nearest


def test_quotas_let_every_sample_into_a_group() -> None:
    assert isf_quotas(Lengths.of([10, 90], [9, 1]), 20) == (9, 20)


def test_without_images_text_alone_fills_a_group() -> None:
    lengths = Lengths.of([40, 40, 20, 64, 63, 10, 64, 5])
    assert isf_quotas(lengths, 64) == (1, 64)
    groups, _ = isf_groups(lengths, 64, 1, 64, seed=0)
    assert len(groups) > 0 and (groups.tokens(lengths) >= 62).all()
