"""Feeder, two encoders and a rank's prefetching as threads of one process, over a real pool: no Ray, no training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from flowtrain.actors.decoding import ImageReader
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.pooling import join_pool
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.actors.reading import MicrobatchReader
from flowtrain.actors.replica_channel import Alone
from flowtrain.actors.spans import SpanLog
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import first_flow_settings, prepare
from flowtrain.data.feed import Feed
from flowtrain.data.images import decode_image
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.flow.units import units_left
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.batch import ImageBatch, SampleArrays, SampleText
from flowtrain.types.events import LedgerRow, Rejected, UnitDone
from flowtrain.types.messages import RankReport
from flowtrain.types.samples import Rejection
from tests.actors.conftest import BATCH, NUM_STEPS, OVERSIZED_ROW, TORN_ROW
from tests.actors.local import LIMIT_S, Background, LocalLink, local_coordinator
from tests.actors.scripted import new_run_id
from tests.data.kept import KeepingShelf

VISION = "vision"
PIXELS: dict[int, list[np.ndarray]] = {}
"""Of every good position; ``expected`` fills it."""


@pytest.fixture(scope="module", autouse=True)
def encoders_load_one_by_one() -> Iterator[None]:
    """Random weights come from the process's one generator, which threads share as actors do not."""
    lock, load = threading.Lock(), LlavaFamily.load_encoder

    def load_alone(self: LlavaFamily, name: str) -> VisionEncoder:
        with lock:
            return load(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlavaFamily, "load_encoder", load_alone)
        yield


class Rank:
    """A backbone rank that reads its samples and does not train."""

    def __init__(self, config: RunConfig, link: LocalLink, run_id: str) -> None:
        self._link = link
        self._member = join_pool(link, config.pool, run_id, "backbone-dp0-pp0-tp0", 0, "backbone")
        self.samples: dict[int, SampleArrays] = {}
        self.num_rows: dict[int, int] = {}
        self.pixels: list[torch.Tensor] = []
        self.num_done = 0
        family = family_from_config(config)
        is_monolithic = config.mode == "monolithic"
        preprocess = partial(family.preprocess, VISION)
        images = ImageReader(self._member.pool, preprocess, config.data.max_image_pixels, num_threads=2)
        reader = MicrobatchReader(
            dp_rank=0,
            pool=self._member.pool,
            rows_of=family.encoder_skeleton(VISION).shape.num_rows if is_monolithic else None,
            images=images if is_monolithic else None,
            pack=_Samples,  # type: ignore[arg-type]  # keeps them instead of packing
            feature_dim=family.feature_dim(VISION),
            feature_dtype=torch.float32,
            spans=SpanLog("backbone"),
        )
        self._prefetcher = Prefetcher(
            name="backbone",
            link=link,
            channel=Alone(),
            dp_rank=0,
            reader=reader,
            limits=config.limits,
            depth=2,
            arrival=config.data.order == "arrival",
            first_unit=0,
            whole_units=config.exchanges_units,
        )

    def run(self, stop_after: int | None = None) -> int:
        """Run to the end, and request a stop in one unit. Returns how many units ran."""
        unit = 0
        try:
            goes_on = self._link.ask(CoordinatorApi.begin, unit)
            while goes_on:
                if unit == stop_after:
                    self._link.ask(CoordinatorApi.request_stop)
                plan = self._prefetcher.next_plan()
                for _ in plan.slots:
                    self._keep(self._prefetcher.next_microbatch().batch)  # type: ignore[arg-type]  # see ``pack``
                report = RankReport(
                    unit, plan.unit.kind, plan.unit.step, 0, 1.0, 0.1, 0.1, 4, 40, 8, 0.0, 1.0, 0.0, 0.0
                )
                goes_on = self._link.ask(CoordinatorApi.finish, (report,), ())
                unit += 1
                self.num_done += 1
        finally:
            self._prefetcher.close()
            self._member.pool.close()
        return unit

    def _keep(self, batch: _Samples) -> None:
        features = batch.features
        if batch.images is not None:
            assert batch.images.sizes == tuple(tuple(each.shape[1:]) for each in batch.images.pixels)
            self.pixels += batch.images.pixels
        for sample in batch.samples:
            assert sample.position not in self.samples, "no sample is trained on twice"
            self.num_rows[sample.position] = sample.num_rows
            mine, features = features[: sample.num_rows], features[sample.num_rows :]
            self.samples[sample.position] = SampleArrays(
                sample.position, sample.text, mine.clone() if len(mine) else None
            )


@dataclass
class _Samples:
    """The samples of a microbatch; stands in for a packed one."""

    samples: list[SampleText]
    features: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    images: ImageBatch | None = None

    @property
    def feature_index(self) -> range:
        return range(sum(sample.num_rows for sample in self.samples))

    def with_features(self, features: torch.Tensor) -> _Samples:
        self.features = features
        return self


def run_everybody(
    config: RunConfig,
    stop_after: int | None = None,
    encoders: Sequence[type[Encoder]] = (Encoder, Encoder),
    meanwhile: Callable[[Rank], None] = lambda rank: None,
) -> tuple[Rank, list[LedgerRow], list[int], int]:
    """Return the rank, the ledger, the rejected rows and how many units ran. Calls ``meanwhile`` during the run."""
    run_spec = prepare(config)
    settings = first_flow_settings(run_spec)
    with local_coordinator(lambda: build_flow(config, run_spec.model_spec, settings)) as link:
        run_id = new_run_id()
        count, nbytes = settings.num_feeders, run_spec.plan.feeder.segment_nbytes
        producers = [
            Background(Feeder(config, run_id, run_spec.indexes, feeder, count, nbytes).run, link)
            for feeder in range(count)
        ]
        for index, encoder in enumerate(encoders if config.has_encoder_actors else ()):
            producers.append(Background(encoder(config, VISION, f"encoder-{index}", run_id).run, link))
        rank = Rank(config, link, run_id)
        running = Background(rank.run, stop_after)
        meanwhile(rank)
        num_units = running.join()
        for producer in producers:
            producer.join()
        link.ask(CoordinatorApi.end_events)
        events = link.ask(CoordinatorApi.events)
    ledger = [row for event in events if isinstance(event, UnitDone) for row in event.ledger]
    rejected = [r.ref.row for event in events if isinstance(event, Rejected) for r in event.rejections]
    return rank, ledger, rejected, num_units


@pytest.fixture(scope="module")
def expected(config: RunConfig) -> dict[int, SampleArrays]:
    """Text and features of every good position, produced without the flow, one image at a time."""
    shelf, family, sources = KeepingShelf(), family_from_config(config), SourceSet.from_config(config.data)
    feed = Feed.from_config(config, shelf=shelf)
    module = family.load_encoder(VISION)
    samples = {}
    PIXELS.clear()
    for unit in units_left(first_flow_settings(prepare(config))):
        for position, outcome in shelf.outcomes(feed.next_unit(unit)).items():
            if isinstance(outcome, Rejection) or outcome[0].ref.row == TORN_ROW:
                continue
            sample, data, _ = outcome
            images = sources.read(sample.ref).images
            pixels = [family.preprocess(VISION, decode_image(image.read())) for image in images]
            PIXELS[position] = pixels
            rows = [features for image in pixels for features in module.encode([image])]
            text = np.frombuffer(data, np.int32).reshape(2, -1)
            samples[position] = SampleArrays(position, text, torch.cat(rows) if rows else None)
    feed.close()
    return samples


def check_samples(found: dict[int, SampleArrays], expected: dict[int, SampleArrays]) -> None:
    for position, sample in found.items():
        other = expected[position]
        assert np.array_equal(sample.text, other.text)
        assert (sample.features is None) == (other.features is None)
        if sample.features is not None and other.features is not None:
            torch.testing.assert_close(sample.features, other.features, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
def test_a_rank_gets_every_good_sample_once(config: RunConfig, expected: dict[int, SampleArrays], order: str) -> None:
    rank, ledger, rejected, num_units = run_everybody(override_config(config, [f"data.order={order}"]))
    assert num_units == NUM_STEPS
    positions = [row.position for row in ledger]
    assert (positions if order == "deterministic" else sorted(positions)) == list(range(BATCH * NUM_STEPS))
    assert sorted(rejected) == [TORN_ROW, OVERSIZED_ROW]
    assert sorted(row.row for row in ledger if row.state == "rejected") == [TORN_ROW, OVERSIZED_ROW]
    assert rank.samples.keys() == expected.keys()
    check_samples(rank.samples, expected)


@pytest.mark.parametrize("change", ["mode=disaggregated", "pool.exchange=point_to_point"])
@pytest.mark.parametrize("order", ["deterministic", "arrival"])
def test_a_step_begins_when_all_its_features_are_there(
    config: RunConfig, expected: dict[int, SampleArrays], order: str, change: str
) -> None:
    rank, ledger, rejected, _ = run_everybody(override_config(config, [change, f"data.order={order}"]))
    assert sorted(row.position for row in ledger) == list(range(BATCH * NUM_STEPS))
    assert sorted(rejected) == [TORN_ROW, OVERSIZED_ROW]
    assert rank.samples.keys() == expected.keys()
    check_samples(rank.samples, expected)


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
def test_a_monolithic_rank_gets_every_good_sample_and_rejects_the_torn_one(
    config: RunConfig, expected: dict[int, SampleArrays], order: str
) -> None:
    rank, ledger, rejected, num_units = run_everybody(
        override_config(config, ["mode=monolithic", f"data.order={order}"])
    )
    assert num_units == NUM_STEPS
    assert sorted(row.position for row in ledger) == list(range(BATCH * NUM_STEPS))
    assert sorted(rejected) == [TORN_ROW, OVERSIZED_ROW]
    assert sorted(row.row for row in ledger if row.state == "rejected") == [TORN_ROW, OVERSIZED_ROW]
    assert rank.samples.keys() == expected.keys()
    in_order = [array for position in rank.samples for array in PIXELS[position]]
    assert len(in_order) == len(rank.pixels) > 0
    assert all(np.array_equal(array, pixels) for array, pixels in zip(in_order, rank.pixels, strict=True))
    for position, sample in rank.samples.items():
        features = expected[position].features
        assert sample.features is None
        assert rank.num_rows[position] == (0 if features is None else len(features))
        assert np.array_equal(sample.text, expected[position].text)


def test_without_vision_texts_and_token_counts_stay_and_no_image_is_decoded(
    config: RunConfig, expected: dict[int, SampleArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr("flowtrain.data.images.decode_image", never)
    rank, ledger, rejected, _ = run_everybody(override_config(config, ["mode=llm_only"]))
    assert [row.position for row in ledger] == list(range(BATCH * NUM_STEPS))
    assert rejected == [OVERSIZED_ROW], "a torn image has a good header"
    assert rank.samples.keys() == {*expected, TORN_ROW}
    for position, sample in expected.items():
        assert np.array_equal(rank.samples[position].text, sample.text)
    assert not any(rank.num_rows.values())


def test_a_stop_ends_all_actors_after_the_running_step(config: RunConfig, expected: dict[int, SampleArrays]) -> None:
    _, ledger, _, num_units = run_everybody(config, stop_after=1)
    assert num_units == 2
    assert [row.position for row in ledger] == list(range(2 * BATCH))


class Faltering(Encoder):
    """Dies once, before it reports its first encoded batch. Then it is started again, as by the controller."""

    died = threading.Event()

    def run(self, link: LocalLink) -> None:  # type: ignore[override]  # these tests have no other link
        try:
            super().run(link)
        except KeyboardInterrupt:
            link.ask(CoordinatorApi.process_lost, self._name)
            type(self)(self._config, self._encoder, self._name, self._run_id).run(link)

    def _hand_in(self, *args: object) -> None:
        if not self.died.is_set():
            self.died.set()
            raise KeyboardInterrupt
        super()._hand_in(*args)  # type: ignore[arg-type]


def test_batches_that_a_lost_encoder_had_leased_are_produced_by_another(
    config: RunConfig, expected: dict[int, SampleArrays]
) -> None:
    Faltering.died.clear()
    rank, ledger, _, _ = run_everybody(config, encoders=(Faltering, Encoder))
    assert Faltering.died.is_set()
    assert [row.position for row in ledger] == list(range(BATCH * NUM_STEPS))
    check_samples(rank.samples, expected)
    assert rank.samples.keys() == expected.keys()


class Holding(Encoder):
    """Encodes one image per batch, and holds the features of position 0 until the gate opens."""

    gate = threading.Event()
    others: set[int]

    def _hand_in(self, member, ready, rejections) -> None:  # type: ignore[no-untyped-def]
        if any(part.position == 0 for part in ready):
            assert self.gate.wait(LIMIT_S)
        super()._hand_in(member, ready, rejections)
        self.others.update(part.position for part in ready)


@pytest.mark.parametrize(("order", "num_before"), [("deterministic", 0), ("arrival", 2)])
def test_by_arrival_steps_go_on_without_what_a_slow_encoder_holds_until_it_must_come(
    config: RunConfig, order: str, num_before: int
) -> None:
    """The slow encoder holds up to two batches: one reported late, and one leased after it."""
    window = config.scheduler.lookahead_steps
    Holding.gate.clear()
    Holding.others = set()
    changes = [f"data.order={order}", "encoders.vision.max_batch_patches=4"]
    with_images = {p for p in range((window + 1) * BATCH) if p % 8 not in (1, 6)} - {TORN_ROW, OVERSIZED_ROW}

    def wait(rank: Rank) -> None:
        """Wait until the others have produced all that the window allows, and the rank has run all that it can."""
        deadline = time.monotonic() + LIMIT_S
        while len(with_images - Holding.others) > 2 or rank.num_done < num_before:
            assert time.monotonic() < deadline, (rank.num_done, Holding.others)
            time.sleep(0.01)
        assert rank.num_done == num_before
        Holding.gate.set()

    _, ledger, _, num_units = run_everybody(
        override_config(config, changes), encoders=(Holding, Holding), meanwhile=wait
    )
    assert num_units == NUM_STEPS
    assert [row.step for row in ledger if row.position == 0] == [num_before + 1]
    assert sorted(row.position for row in ledger) == list(range(BATCH * NUM_STEPS))
    assert all(abs(row.step - (1 + row.position // BATCH)) <= (window if num_before else 0) for row in ledger)
