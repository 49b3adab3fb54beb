"""A feed: which samples it draws, what it makes of them, and how its work is shared, resumed and done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowtrain.config.data import DataConfig, EvalConfig, SourceConfig
from flowtrain.data.feed import Feed, FeederPlace
from flowtrain.data.sampler import Sampler
from flowtrain.data.sizing import Sizer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.flow.units import unit_sequence
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.messages import Remake
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import (
    EVAL_POSITION_BASE,
    IMAGES_PART,
    TEXT_PART,
    Rejection,
    RejectReason,
    SampleRef,
    SamplerState,
)
from tests.data.kept import KeepingShelf, Outcome

END = 200


class Fed:
    """A feed with its shelf."""

    def __init__(self, feed: Feed, shelf: KeepingShelf) -> None:
        self.feed = feed
        self.shelf = shelf

    def next_unit(self, unit: Unit, consumed: frozenset[int] = frozenset()) -> dict[int, Outcome]:
        return self.shelf.outcomes(self.feed.next_unit(unit, consumed))


MakeFeed = Callable[..., Fed]


@pytest.fixture
def make_feed(
    tmp_path: Path,
    byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
    chatml_marked: str,
    family: Callable[..., Any],
    write_parquet: Callable[..., Path],
    encoded_image: Callable[..., bytes],
) -> Iterator[MakeFeed]:
    """Make feeds over two sources of 10 and 6 rows and an evaluation source of 5; rows in ``bad`` are corrupt.

    Row 3 of the first source has no image, and row 5 has one in a file of its own.
    """
    made: list[Feed] = []
    (tmp_path / "own.png").write_bytes(encoded_image(24, 16))

    def rows(count: int, letter: str, bad: frozenset[int]) -> list[dict[str, Any]]:
        images = {i: [{"bytes": encoded_image(16, 16), "path": None}] for i in range(count)}
        images |= {i: [{"bytes": b"broken", "path": None}] for i in bad}
        if letter == "a":
            images |= {3: [], 5: [{"bytes": None, "path": "own.png"}]}
        return [{"images": images[i], "texts": [{"user": "?", "assistant": f"{letter}{i}"}]} for i in range(count)]

    def make(
        bad: frozenset[int] = frozenset(),
        shuffle: str = "blocks",
        feeder: int = 0,
        num_feeders: int = 1,
        state: SamplerState | None = None,
    ) -> Fed:
        paths = []
        for letter, count in (("a", 10), ("b", 6), ("e", 5)):
            broken = bad if letter == "a" else frozenset()
            path = tmp_path / f"{letter}{len(broken)}.parquet"
            if not path.exists():  # another feed may read it
                write_parquet(path, rows(count, letter, broken))
            paths.append(str(path))
        sources = (SourceConfig(path=paths[0], weight=2), SourceConfig(path=paths[1]))
        config = DataConfig(sources=sources, eval=EvalConfig(path=paths[2]), shuffle=shuffle, shuffle_blocks=2)  # type: ignore[arg-type]
        opened = SourceSet.from_config(config)
        sampler = Sampler(opened.tables, [2, 1], 3, config.shuffle, config.shuffle_blocks)
        if state is not None:
            sampler.restore(state)
        tokenizer, shelf = byte_tokenizer(chatml_marked), KeepingShelf()
        sizer, place = Sizer(family(tokenizer), tokenizer, config), FeederPlace(feeder, num_feeders)
        made.append(Feed(config, opened, sampler, sizer, shelf, place, END))
        return Fed(made[-1], shelf)

    yield make
    for feed in made:
        feed.close()


def ref_of(outcome: Outcome) -> SampleRef:
    return outcome.ref if isinstance(outcome, Rejection) else outcome[0].ref


@pytest.mark.parametrize("shuffle", ["blocks", "rows", "none"])
def test_units_are_sized_at_their_positions(make_feed: MakeFeed, shuffle: str) -> None:
    feed = make_feed(shuffle=shuffle)
    for unit in unit_sequence(6, 4, None, [EvalRounds(2, 3)]):
        found = feed.next_unit(unit)
        assert list(found) == list(unit.positions)
        refs = [ref_of(outcome) for outcome in found.values()]
        if unit.kind is UnitKind.EVAL:
            round_index = unit.step // 2 - 1
            assert refs == [SampleRef(EVAL_POSITION_BASE + 3 * round_index + i, 2, i, 0) for i in range(3)]
        else:
            assert {ref.source for ref in refs} == {0, 1}
        for outcome in found.values():
            assert not isinstance(outcome, Rejection)
            sample, _, images = outcome
            assert len(images) == sum(sample.image_nbytes)
            assert bool(images) == ((sample.ref.source, sample.ref.row) != (0, 3))


def test_evaluations_and_rejections_do_not_move_the_order(make_feed: MakeFeed) -> None:
    plain = make_feed()
    without = [result for unit in unit_sequence(8, 4, None) for result in plain.next_unit(unit).values()]
    feed = make_feed(bad=frozenset({2, 7}))
    units = list(unit_sequence(8, 4, None, [EvalRounds(3, 5)]))
    sized = [(unit, feed.next_unit(unit)) for unit in units]
    with_both = [result for unit, found in sized if unit.kind is UnitKind.TRAIN for result in found.values()]
    assert [ref_of(result) for result in with_both] == [ref_of(result) for result in without]
    for ours, theirs in zip(with_both, without, strict=True):
        if isinstance(ours, Rejection):
            assert ours.reason is RejectReason.CORRUPT_IMAGE and ours.ref.source == 0 and ours.ref.row in (2, 7)
        else:
            assert ours == theirs
    assert sum(isinstance(result, Rejection) for result in with_both) >= 2


@pytest.mark.parametrize("shuffle", ["blocks", "rows", "none"])
@pytest.mark.parametrize("num_feeders", [2, 3])
def test_feeders_share_the_work_of_one(make_feed: MakeFeed, shuffle: str, num_feeders: int) -> None:
    alone = make_feed(frozenset({2}), shuffle)
    feeders = [make_feed(frozenset({2}), shuffle, i, num_feeders) for i in range(num_feeders)]
    counts = [0] * num_feeders
    for unit in unit_sequence(10, 5, None, [EvalRounds(3, 5)]):
        whole, shares = alone.next_unit(unit), [feeder.next_unit(unit) for feeder in feeders]
        assert sum(len(share) for share in shares) == len(whole)
        together = {position: outcome for share in shares for position, outcome in share.items()}
        assert dict(sorted(together.items())) == whole
        counts = [count + len(share) for count, share in zip(counts, shares, strict=True)]
        assert len({json.dumps(each.feed.state().to_dict()) for each in (alone, *feeders)}) == 1
    assert min(counts) > 0


@pytest.mark.parametrize("shuffle", ["blocks", "rows", "none"])
def test_a_restored_feed_continues_also_with_others_beside_it(make_feed: MakeFeed, shuffle: str) -> None:
    units = list(unit_sequence(6, 4, 22, [EvalRounds(2, 3)]))
    feed = make_feed(shuffle=shuffle)
    whole, states = [], []
    for unit in units:
        whole.append(feed.next_unit(unit))
        states.append(json.dumps(feed.feed.state().to_dict()))
    for done in range(1, len(units)):
        state = SamplerState.from_dict(json.loads(states[done - 1]))
        num_feeders = 1 + done % 3
        resumed = [make_feed(frozenset(), shuffle, i, num_feeders, state) for i in range(num_feeders)]
        for unit, expected in zip(units[done:], whole[done:], strict=True):
            found = [outcome for each in resumed for outcome in each.next_unit(unit).items()]
            assert dict(sorted(found)) == expected


@pytest.mark.parametrize("shuffle", ["blocks", "rows", "none"])
def test_what_was_consumed_is_drawn_and_not_sized(make_feed: MakeFeed, shuffle: str) -> None:
    units = list(unit_sequence(4, 4, 16))
    plain = make_feed(shuffle=shuffle)
    whole = [plain.next_unit(unit) for unit in units]
    feed = make_feed(shuffle=shuffle)
    consumed = frozenset({1, 2})
    first = feed.next_unit(units[0], consumed)
    assert first == {position: outcome for position, outcome in whole[0].items() if position not in consumed}
    assert [feed.next_unit(unit) for unit in units[1:]] == whole[1:]
    assert len(feed.shelf.held) == len(plain.shelf.held)


def test_lost_parts_are_made_again(make_feed: MakeFeed) -> None:
    feed = make_feed()
    units = [Unit(0, UnitKind.TRAIN, 1, 0, 8), Unit(1, UnitKind.EVAL, 1, EVAL_POSITION_BASE, 5)]
    found = [outcome for unit in units for outcome in feed.next_unit(unit).values()]
    state, held = feed.feed.state(), len(feed.shelf.held)
    for outcome in found:
        assert not isinstance(outcome, Rejection)
        sample, text, images = outcome
        names = (IMAGES_PART, TEXT_PART) if images else (TEXT_PART,)
        parts = feed.feed.remake(Remake(sample.ref, names))
        assert [(part.position, part.part) for part in parts] == [(sample.position, name) for name in names]
        bytes_of = {part.part: feed.shelf.held.pop(part.extents[0].gva) for part in parts}
        assert bytes_of == ({IMAGES_PART: images, TEXT_PART: text} if images else {TEXT_PART: text})
    assert feed.feed.state() == state and len(feed.shelf.held) == held
    with pytest.raises(DataError, match=r"position 9 \(row 4 of .*a1\.parquet\).*corrupt_image"):
        make_feed(bad=frozenset({4})).feed.remake(Remake(SampleRef(9, 0, 4, 0), (TEXT_PART,)))


def test_a_unit_out_of_order_is_a_mistake(make_feed: MakeFeed) -> None:
    with pytest.raises(AssertionError, match="starts at position 4, but the sampler was at 0"):
        make_feed().next_unit(Unit(1, UnitKind.TRAIN, 2, 4, 4))


def test_the_data_in_the_repository_is_sized_whole(family: Callable[..., Any]) -> None:
    config = DataConfig(
        sources=(SourceConfig(path="assets/openclipart/train.parquet"),),
        eval=EvalConfig(path="assets/openclipart/eval.parquet"),
    )
    sources, tokenizer = SourceSet.from_config(config), AutoTokenizer.from_pretrained("assets/tokenizer")
    num_train, num_eval = map(len, sources.all)
    sampler = Sampler(sources.tables, [1.0], 0, config.shuffle, config.shuffle_blocks)
    shelf = KeepingShelf()
    feed = Feed(config, sources, sampler, Sizer(family(tokenizer), tokenizer, config), shelf, end=num_train)
    units = [
        Unit(0, UnitKind.TRAIN, 1, 0, num_train),
        Unit(1, UnitKind.EVAL, 1, EVAL_POSITION_BASE, num_eval),
    ]
    shares = [feed.next_unit(unit) for unit in units]
    feed.close()
    sized = [sample for share in shares for sample in share.sized]
    assert len(sized) == num_train + num_eval and not any(share.rejections for share in shares)
    assert {0, 1, 2, 3} <= {len(sample.image_nbytes) for sample in sized}
    for share in shares:
        shelf.outcomes(share)
    assert not shelf.held, "all rows of all blocks were handed out"
