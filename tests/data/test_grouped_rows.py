"""Rows of an epoch in balanced groups, and the packing that finds these again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import sampler_from_config, with_vision_quota
from flowtrain.data.grouped_rows import GroupedRows
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.grouping import isf_groups
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.scheduler.packing.groups import groups
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.scheduler.summary import dist_ratio
from flowtrain.types.plan import Unit, UnitKind

CAPACITY, NUM_ROWS, REJECTED = 1024, 600, {7, 300}
TABLE = np.array([0, 100, NUM_ROWS])


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``flowtrain data check --sizes`` writes them; two rows were rejected."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("sizes") / "sizes.csv"
    lines = ["num_image_tiles,num_tokens,num_vision_tokens,num_target_tokens,image_nbytes,row,source"]
    for row in range(NUM_ROWS):
        images = int(rng.integers(0, 4))
        tokens = 64 * images + int(rng.integers(20, 200))
        if row not in REJECTED:
            lines.append(f"{images},{tokens},{64 * images},10,1000,{row},data")
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(sizes: Path, *overrides: str) -> RunConfig:
    values = {
        "name": "grouped",
        "encoders": {"vision": {"config": {}}},
        "backbone": {"config": {}},
        "data": {
            "sources": [{"path": "unused"}],
            "max_seq_len": 512,
            "shuffle": "rows",
            "grouping": {"sizes": str(sizes)},
        },
        "scheduler": {"packing": "groups", "microbatch_tokens": CAPACITY},
        "training": {"global_batch_size": 64, "max_steps": 4},
    }
    return override_config(RunConfig.model_validate(values), overrides, check_paths=False)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(sizes: Path) -> None:
    rows = GroupedRows.read(str(sizes), NUM_ROWS, CAPACITY)
    first, again, second = (rows.order(CAPACITY, None, 3, epoch) for epoch in (0, 0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(NUM_ROWS))
    assert np.array_equal(first, again) and not np.array_equal(first, second)
    assert set(first[-2:].tolist()) == REJECTED


def test_packing_finds_the_groups_again_and_they_are_balanced(sizes: Path) -> None:
    rows = GroupedRows.read(str(sizes), NUM_ROWS, CAPACITY)
    quota = rows.vision_quota(CAPACITY)
    order = rows.order(CAPACITY, quota, 3, 0)[: -len(REJECTED)]
    place = {int(row): index for index, row in enumerate(rows.rows)}
    at = np.array([place[int(row)] for row in order])
    lengths = Lengths(rows.lengths.tokens[at], rows.lengths.vision[at])
    packed = groups(lengths, PackingRules(CAPACITY, eq3(CAPACITY), vision_quota=quota))
    assert (packed.tokens(lengths) <= CAPACITY).all() and (packed.vision(lengths) <= quota).all()
    drawn = isf_groups(rows.lengths, CAPACITY, 0, vision_quota=quota)
    assert len(packed) <= 1.1 * len(drawn)
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    plain = Lengths(lengths.tokens[shuffled], lengths.vision[shuffled])
    unbalanced = groups(plain, PackingRules(CAPACITY, eq3(CAPACITY)))

    def ratio(values: np.ndarray) -> float:
        return dist_ratio(values[: len(values) // 4 * 4].reshape(-1, 4))

    assert ratio(packed.vision(lengths)) < 0.7 * ratio(unbalanced.vision(plain))
    assert ratio(packed.tokens(lengths)) < ratio(unbalanced.tokens(plain))


def test_a_runs_sampler_follows_the_groups_and_resumes_inside_them(sizes: Path) -> None:
    config = with_vision_quota(config_of(sizes), [TABLE])
    assert config.data.grouping is not None and config.data.grouping.vision_tokens is not None
    assert with_vision_quota(config, [TABLE]) is config
    whole = sampler_from_config(config, [TABLE])
    drawn = [draw.ref.row for draw in whole.take(NUM_ROWS + 50)]
    rows = GroupedRows.read(str(sizes), NUM_ROWS, CAPACITY)
    quota = config.data.grouping.vision_tokens
    expected = [*rows.order(CAPACITY, quota, config.seed, 0), *rows.order(CAPACITY, quota, config.seed, 1)[:50]]
    assert drawn == expected
    begun, resumed = (sampler_from_config(config, [TABLE]) for _ in range(2))
    begun.take(123)
    resumed.restore(begun.state())
    assert [draw.ref.row for draw in resumed.take(10)] == drawn[123:133]
    other = sizes.with_name("other.csv")
    other.write_text(sizes.read_text().rsplit("\n", 2)[0] + "\n")
    with pytest.raises(CheckpointError, match="blocks of the sources"):
        sampler_from_config(config_of(other), [TABLE]).restore(begun.state())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.shuffle=blocks", r"data.grouping needs data.shuffle 'rows' \(now 'blocks'\)"),
        ("data.order=arrival", r"data.grouping needs data.order 'deterministic' \(now 'arrival'\)"),
        ("scheduler.packing=isf", r"data.grouping needs scheduler.packing 'groups' \(now 'isf'\)"),
        ("data.grouping=null", r"scheduler.packing \('groups'\) needs data.grouping"),
        ('data.sources=[{"path": "a"}, {"path": "b"}]', "groups the samples of one source, and data.sources has 2"),
    ],
)
def test_what_breaks_groups_up_is_refused(sizes: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(sizes, override)


def test_sizes_of_other_data_are_refused(sizes: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows from 0 to 599, and the source has 500 rows from 0"):
        GroupedRows.read(str(sizes), 500, CAPACITY)
    with pytest.raises(ConfigError, match=r"tokens, and scheduler.microbatch_tokens is 100"):
        GroupedRows.read(str(sizes), NUM_ROWS, 100)
    with pytest.raises(ConfigError, match=r"data.grouping.sizes \(.*none.csv\) cannot be read"):
        GroupedRows.read(str(tmp_path / "none.csv"), NUM_ROWS, CAPACITY)
    (tmp_path / "plain.csv").write_text("num_image_tiles,num_tokens\n1,20\n")
    with pytest.raises(ConfigError, match="has no column row; write it by flowtrain data check --sizes"):
        GroupedRows.read(str(tmp_path / "plain.csv"), 1, CAPACITY)


def test_steps_are_packed_by_the_quota_of_the_groups(sizes: Path) -> None:
    config = with_vision_quota(config_of(sizes), [TABLE])
    assert config.data.grouping is not None
    rules = StepPlanner.from_config(config, 2, eq3(CAPACITY)).rules(Unit(0, UnitKind.TRAIN, 1, 0, 64))
    assert rules.vision_quota == config.data.grouping.vision_tokens == 512
