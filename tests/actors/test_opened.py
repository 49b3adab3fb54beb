"""What each role of a run opens: configurations, tokenizer, image processor, weights, the data's footers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.actors import encoder_rank
from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.coordinator import start_flow
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.encoder_rank import EncoderRank
from flowtrain.actors.feeder import Feeder
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import RunSpec, first_flow_settings, prepare
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.models import llava_config
from flowtrain.models.families import hf_family, llava
from flowtrain.models.weights import Origin
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.messages import FeedOrder, Joined, LeaseOrder
from flowtrain.types.plan import Degrees, StateOrigin
from tests.actors.scripted import ScriptedLink, new_run_id

CONFIGURATIONS, TOKENIZER, PROCESSOR, FOOTERS = "configurations", "tokenizer", "image processor", "footers"
TOWER, LANGUAGE = "tower's weights", "backbone's weights"
LOADERS: dict[str, tuple[Any, str]] = {
    CONFIGURATIONS: (llava_config, "read_config"),
    TOKENIZER: (hf_family, "load_tokenizer"),
    PROCESSOR: (llava, "load_image_processor"),
    TOWER: (Origin, "build"),
    LANGUAGE: (hf_family.HFFamily, "backbone_weights"),
    FOOTERS: (SourceSet, "index"),
}


@pytest.fixture(scope="module")
def run_spec(config: RunConfig) -> RunSpec:
    return prepare(config)


@pytest.fixture
def opened(run_spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thing was opened."""
    found: Counter[str] = Counter()

    def counting(what: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            found[what] += 1
            return load(*args, **kwargs)

        return counted

    for what, (owner, name) in LOADERS.items():
        monkeypatch.setattr(owner, name, counting(what, getattr(owner, name)))
    return found


def test_the_driver_opens_everything_but_weights(config: RunConfig, opened: Counter[str]) -> None:
    prepare(config)
    assert opened == {CONFIGURATIONS: 2, TOKENIZER: 1, PROCESSOR: 1, FOOTERS: 1}


def test_the_coordinator_opens_nothing(config: RunConfig, run_spec: RunSpec, opened: Counter[str]) -> None:
    settings = first_flow_settings(run_spec)
    opened.clear()
    start_flow(config, run_spec.model_spec, settings)
    assert opened == {}


def test_a_feeder_opens_no_weights_and_takes_the_drivers_index(
    config: RunConfig, run_spec: RunSpec, opened: Counter[str]
) -> None:
    link = ScriptedLink(Joined(0, first_flow_settings(run_spec).sampler_state))
    link.answers("feed", FeedOrder(None, (), (), stop=True))
    Feeder(config, new_run_id(), run_spec.indexes).run(link)
    assert opened == {CONFIGURATIONS: 2, TOKENIZER: 1, PROCESSOR: 1}


def test_an_encoder_opens_its_tower_and_no_tokenizer(config: RunConfig, opened: Counter[str]) -> None:
    link = ScriptedLink()
    link.answers("lease", LeaseOrder(None, (), stop=True))
    Encoder(config, "vision", "encoder-0", new_run_id()).run(link)
    assert opened == {CONFIGURATIONS: 2, TOWER: 1}, "the image processor comes with the first image"


def test_an_encoder_rank_opens_its_tower_alone(
    config: RunConfig, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(mesh=None, receive=lambda dtype: None, close=lambda: None)
    monkeypatch.setattr(encoder_rank, "join_replica", lambda *args: group)
    monkeypatch.setattr(encoder_rank, "parallelize_tower", lambda *args: None)
    EncoderRank(config, "vision", "encoder-0", 1).run(0)
    assert opened == {CONFIGURATIONS: 2, TOWER: 1}


def test_a_backbone_rank_opens_no_image_processor_and_no_tower(config: RunConfig, opened: Counter[str]) -> None:
    rank = BackboneRank(config, 0, Degrees(), "backbone-dp0-pp0-tp0", 4, new_run_id())
    rank.start(LOOPBACK, 0, StateOrigin(), (), None)
    try:
        assert opened == {CONFIGURATIONS: 2, TOKENIZER: 1, LANGUAGE: 1}
    finally:
        rank._group.close()
