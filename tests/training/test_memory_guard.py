"""A rank whose step took too much recomputes more; the choice of all ranks is put into the configuration."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowtrain.pipeline.actions import MemoryStrategy, StageModule
from flowtrain.pipeline.configured import configured_memory, configured_partition
from flowtrain.training.memory_choice import decide_recomputation, foreseen_recomputation, with_recomputation
from flowtrain.training.memory_guard import MemoryGuard
from flowtrain.training.mesh import init_backbone_group
from flowtrain.types.plan import Degrees
from tests.training.ranks import CPU, TinyFamily, make_config

BACKBONE = StageModule.BACKBONE
GIB = 2**30


def test_more_is_recomputed_until_a_step_fits(caplog: pytest.LogCaptureFixture) -> None:
    peaks = iter([9 * GIB, 13 * GIB, 10 * GIB, 99 * GIB, 99 * GIB, 99 * GIB])
    guard = MemoryGuard([(BACKBONE, 0, 4)], {BACKBONE: 2 * GIB}, 10 * GIB, lambda: next(peaks))
    memory: dict[Any, Any] = {(BACKBONE, 0): MemoryStrategy.KEEP, (BACKBONE, 1): MemoryStrategy.KEEP}
    with caplog.at_level(logging.WARNING):
        assert guard.after_step(memory) is None and caplog.text == ""
        changed = guard.after_step(memory)
        assert changed is not None and str(changed[BACKBONE, 0]) == "recompute*2+keep*2"
        assert "took 13.00 GiB" in caplog.text and "backbone recompute*2+keep*2" in caplog.text
        assert guard.after_step(changed) is None
        changed = guard.after_step(changed)
        assert changed is not None and changed[BACKBONE, 0] == MemoryStrategy.RECOMPUTE
        assert changed[BACKBONE, 1] == MemoryStrategy.KEEP, "it is another rank's"
        for _ in range(2):
            assert guard.after_step(changed) is None
    assert caplog.text.count("lower scheduler.microbatch_tokens") == 1


@pytest.mark.parametrize(("usable", "words"), [(1 << 40, "none"), (1, "full")])
def test_ranks_choose_by_their_memory(usable: int, words: str) -> None:
    backbone = {"path": "unused", "activation_checkpointing": "adaptive", "usable_memory_nbytes": usable}
    config, family = make_config(backbone=backbone), TinyFamily()
    group = init_backbone_group(0, Degrees(), CPU)
    chosen = decide_recomputation(config, family, group)  # type: ignore[arg-type]
    group.close()
    assert chosen is not None and chosen.encoder is None
    foreseen = foreseen_recomputation(config, family, Degrees(), 80 * GIB, 1)  # type: ignore[arg-type]
    assert foreseen is not None and foreseen.backbone == chosen.backbone
    decided = with_recomputation(config, chosen)
    depth = family.model_spec.backbone.num_layers
    assert decided.backbone.activation_checkpointing == (words,) * depth
    partition = configured_partition(decided, family.model_spec, 1)
    assert chosen.counts(partition) == {(BACKBONE, 0): depth if words == "full" else 0}
    strategy = MemoryStrategy.RECOMPUTE if words == "full" else MemoryStrategy.KEEP
    assert configured_memory(decided, partition) == {(BACKBONE, 0): strategy}


def test_what_is_not_adaptive_is_not_chosen() -> None:
    config = make_config(backbone={"path": "unused", "activation_checkpointing": "full"})
    group = init_backbone_group(0, Degrees(), CPU)
    assert decide_recomputation(config, TinyFamily(), group) is None  # type: ignore[arg-type]
    group.close()
