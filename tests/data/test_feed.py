from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowtrain.config.data import DataConfig, EvalConfig, SourceConfig
from flowtrain.data.feed import Feed
from flowtrain.data.sampler import Sampler
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.flow.units import unit_sequence
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, RejectReason, SampleRef, SamplerState


@pytest.fixture
def make_feed(
    tmp_path: Path,
    byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
    chatml_marked: str,
    family: Callable[..., Any],
    write_parquet: Callable[..., Path],
    encoded_image: Callable[..., bytes],
) -> Callable[..., Feed]:
    """Build a feed over two sources of 10 and 6 rows and an evaluation source of 5; rows in ``bad`` are corrupt."""

    def rows(count: int, letter: str, bad: set[int]) -> list[dict[str, Any]]:
        image = [{"bytes": encoded_image(16, 16), "path": None}]
        corrupt = [{"bytes": b"broken", "path": None}]
        return [
            {"images": corrupt if i in bad else image, "texts": [{"user": "?", "assistant": f"{letter}{i}"}]}
            for i in range(count)
        ]

    def make(bad: set[int] = frozenset()) -> Feed:  # type: ignore[assignment]
        paths = [
            str(write_parquet(tmp_path / f"{letter}.parquet", rows(count, letter, bad if letter == "a" else set())))
            for letter, count in (("a", 10), ("b", 6), ("e", 5))
        ]
        sources = (SourceConfig(path=paths[0], weight=2), SourceConfig(path=paths[1]))
        config = DataConfig(sources=sources, eval=EvalConfig(path=paths[2]))
        opened = SourceSet.from_config(config)
        tokenizer = byte_tokenizer(chatml_marked)
        return Feed(opened, sampler_of(opened.sizes, [2, 1], seed=3), Sizer(family(tokenizer), tokenizer, config))

    return make


def sampler_of(sizes: Sequence[int], weights: Sequence[float], seed: int) -> Sampler:
    return Sampler([np.array([0, size]) for size in sizes], weights, seed, "rows", 1)


def outcome(result: SizedResult | Rejection) -> tuple[Any, ...]:
    if isinstance(result, Rejection):
        return (result,)
    return result.sample, result.text.tobytes()


def refs(results: list[SizedResult | Rejection]) -> list[SampleRef]:
    return [result.ref if isinstance(result, Rejection) else result.sample.ref for result in results]


def test_units_are_sized_at_their_positions(make_feed: Callable[..., Feed]) -> None:
    feed = make_feed()
    for unit in unit_sequence(6, 4, None, eval_every=2, num_eval=3):
        results = feed.next_unit(unit)
        assert [ref.position for ref in refs(results)] == list(unit.positions)
        if unit.kind is UnitKind.EVAL:
            round_index = unit.step // 2 - 1
            assert refs(results) == [SampleRef(EVAL_POSITION_BASE + 3 * round_index + i, 2, i, 0) for i in range(3)]
        else:
            assert {ref.source for ref in refs(results)} == {0, 1}


def test_evaluations_and_rejections_do_not_move_the_order(make_feed: Callable[..., Feed]) -> None:
    plain = make_feed()
    without = [result for unit in unit_sequence(8, 4, None, None, 0) for result in plain.next_unit(unit)]
    feed = make_feed(bad={2, 7})
    units = list(unit_sequence(8, 4, None, eval_every=3, num_eval=5))
    sized = [(unit, feed.next_unit(unit)) for unit in units]
    with_both = [result for unit, results in sized if unit.kind is UnitKind.TRAIN for result in results]
    assert refs(with_both) == refs(without)
    for ours, theirs in zip(with_both, without, strict=True):
        if isinstance(ours, Rejection):
            assert ours.reason is RejectReason.CORRUPT_IMAGE and ours.ref.source == 0 and ours.ref.row in (2, 7)
        else:
            assert outcome(ours) == outcome(theirs)
    assert sum(isinstance(result, Rejection) for result in with_both) >= 2


def test_a_restored_feed_continues(make_feed: Callable[..., Feed]) -> None:
    units = list(unit_sequence(6, 4, 22, eval_every=2, num_eval=3))
    feed = make_feed()
    whole, states = [], []
    for unit in units:
        whole.append([outcome(result) for result in feed.next_unit(unit)])
        states.append(json.dumps(feed.state().to_dict()))
    for done in range(1, len(units)):
        resumed = make_feed()
        resumed.restore(SamplerState.from_dict(json.loads(states[done - 1])))
        rest = [[outcome(result) for result in resumed.next_unit(unit)] for unit in units[done:]]
        assert rest == whole[done:]


def test_what_was_consumed_is_drawn_and_not_sized(make_feed: Callable[..., Feed]) -> None:
    units = list(unit_sequence(2, 4, None, None, 0))
    plain = make_feed()
    first, second = ([outcome(result) for result in plain.next_unit(unit)] for unit in units)
    feed = make_feed()
    assert [outcome(result) for result in feed.next_unit(units[0], consumed={1, 2})] == [first[0], first[3]]
    assert [outcome(result) for result in feed.next_unit(units[1])] == second


def test_a_lost_text_part_is_made_again(make_feed: Callable[..., Feed]) -> None:
    feed = make_feed()
    units = [Unit(0, UnitKind.TRAIN, 1, 0, 8), Unit(1, UnitKind.EVAL, 1, EVAL_POSITION_BASE, 5)]
    results = [result for unit in units for result in feed.next_unit(unit)]
    state = feed.state()
    for result in results:
        assert isinstance(result, SizedResult)
        again = feed.resize(result.sample.ref)
        assert again.sample == result.sample and np.array_equal(again.text, result.text)
    assert feed.state() == state
    with pytest.raises(DataError, match=r"position 9 \(row 4 of .*a\.parquet\).*corrupt_image"):
        make_feed(bad={4}).resize(SampleRef(9, 0, 4, 0))


def test_a_unit_out_of_order_is_a_mistake(make_feed: Callable[..., Feed]) -> None:
    with pytest.raises(AssertionError, match="starts at position 4, but the sampler was at 0"):
        make_feed().next_unit(Unit(1, UnitKind.TRAIN, 2, 4, 4))


def test_the_data_in_the_repository_is_sized_whole(family: Callable[..., Any]) -> None:
    config = DataConfig(
        sources=(SourceConfig(path="assets/openclipart/train.parquet"),),
        eval=EvalConfig(path="assets/openclipart/eval.parquet"),
    )
    sources, tokenizer = SourceSet.from_config(config), AutoTokenizer.from_pretrained("assets/tokenizer")
    assert sources.evaluation is not None
    num_train, num_eval = sources.sizes[0], len(sources.evaluation)
    feed = Feed(sources, sampler_of(sources.sizes, [1.0], seed=0), Sizer(family(tokenizer), tokenizer, config))
    units = [
        Unit(0, UnitKind.TRAIN, 1, 0, num_train),
        Unit(1, UnitKind.EVAL, 1, EVAL_POSITION_BASE, num_eval),
    ]
    results = [result for unit in units for result in feed.next_unit(unit)]
    assert len(results) == num_train + num_eval
    assert [result for result in results if isinstance(result, Rejection)] == []
    num_images = [sum(part.num_items for part in r.sample.parts[1:]) for r in results if isinstance(r, SizedResult)]
    assert {0, 1, 2, 3} <= set(num_images)
