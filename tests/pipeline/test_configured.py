"""What a configuration gives: strategies of stages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowtrain.config.model import BackboneConfig, EncoderConfig
from flowtrain.errors import ConfigError
from flowtrain.pipeline.actions import MemoryStrategy, StageModule
from flowtrain.pipeline.configured import configured_memory
from tests.pipeline.partitions import even, with_encoder

KEEP = MemoryStrategy.KEEP
WORDS = ["none", "full", "full", "full", "offload", "offload", "selective", "none"]


def texts(partition, encoder=None, **settings):
    config = SimpleNamespace(
        backbone=BackboneConfig(path="unused", **settings),
        encoders={"vision": EncoderConfig(path="unused", trainable=True, activation_checkpointing=encoder)},
    )
    memory = configured_memory(config, partition)
    assert list(memory) == [(stage.module, stage.index) for stage in partition.stages]
    return [str(strategy) for strategy in memory.values()]


def test_a_word_is_for_every_stage_that_is_trained():
    assert texts(even(2), activation_checkpointing="full") == ["recompute", "recompute"]
    assert texts(even(1), activation_checkpointing="every_n", checkpoint_every=3) == ["recompute/3"]
    assert texts(with_encoder(1, "own"), activation_checkpointing="offload") == ["keep", "offload"]
    assert texts(with_encoder(1, "own", is_trained=True), activation_checkpointing="offload") == ["offload"] * 2


def test_a_list_is_for_decoder_layers():
    each = ["keep*1+recompute*1", "recompute", "offload", "selective*1+keep*1"]
    assert texts(even(2, 2), activation_checkpointing=WORDS) == each
    partition = with_encoder(2, "first", chunks=2, is_trained=True, cost=0.01)
    assert [len(stage.layers) for stage in partition.of_module(StageModule.BACKBONE)] == [2, 2, 2, 2]
    assert texts(partition, activation_checkpointing=WORDS) == ["keep", *each]


def test_a_list_has_a_word_for_each_layer():
    with pytest.raises(ConfigError, match=r"activation_checkpointing lists 8 layers, and the backbone has 6"):
        texts(even(3), activation_checkpointing=WORDS)


def test_a_trained_encoder_may_have_words_of_its_own():
    partition = with_encoder(1, "own", is_trained=True)
    assert texts(partition, "full") == ["recompute", "keep"]
    own = ["full"] * 3 + ["none"] * 5
    assert texts(partition, own, activation_checkpointing="offload") == ["recompute*3+keep*5", "offload"]
    assert texts(with_encoder(1, "own"), None, activation_checkpointing="full") == ["keep", "recompute"]
    with pytest.raises(ConfigError, match=r"encoders.vision.activation_checkpointing lists 3 layers, and the encoder "):
        texts(partition, own[:3])


def test_adaptive_counts_as_full_until_ranks_have_chosen():
    assert texts(with_encoder(1, "own", is_trained=True), activation_checkpointing="adaptive") == ["recompute"] * 2
