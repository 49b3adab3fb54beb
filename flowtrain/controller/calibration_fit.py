"""What the spans of a finished run took, beside what was predicted for them. No Ray, no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from statistics import fmean
from typing import Any

import numpy as np

from flowtrain.allocator.plan import fixed_plan
from flowtrain.allocator.shards import num_shards
from flowtrain.config.run import RunConfig
from flowtrain.controller.actor_specs import actor_specs_of
from flowtrain.controller.calibration_pairs import UPDATE, JoinedPass, Pairs
from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.calibration import LEAST, DeviceTotal
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, ragged_squares
from flowtrain.costs.profile_together import encoding_adds_s
from flowtrain.costs.profiled_times import CPU
from flowtrain.emulation.process import BACKBONE
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.partition import Partition, Stage
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.program import BoolArray
from flowtrain.simulator.step import Passes, StepSimulator, stage_work
from flowtrain.types.messages import Span

FORWARD, BACKWARD, ENCODE, DECODE = "forward", "backward", "encode", "decode"
WORK = (FORWARD, BACKWARD, UPDATE, ENCODE, DECODE)
"""Names of the spans that are compared."""
_COORDINATES = re.compile(r"backbone-dp(\d+)-pp(\d+)-tp(\d+)")


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step's spans; seconds are the devices'."""

    seconds: float
    starved_s: float
    spans: tuple[Span, ...]
    scale: float
    """Seconds of this machine in one of the devices'."""

    def seconds_of(self, spans: Iterable[Span]) -> float:
        """Return the seconds in which any of the spans lasts."""
        total, until = 0.0, -np.inf
        for span in sorted(spans, key=lambda each: each.start_s):
            total += max(0.0, span.end_s - max(span.start_s, until))
            until = max(until, span.end_s)
        return total / self.scale


class Fit:
    """Predicts a run's spans, step by step.

    Where an encoder's actor shares its device with a rank (``colocated``, or one device for all), or a rank's device
    decodes images (``monolithic`` on CPUs), a span's end tells little of its own work. There all that a device does
    in a step counts as one; devices with other shares of both kinds of work tell them apart.
    """

    def __init__(self, config: RunConfig, planned: Planned, times: DeviceTimes) -> None:
        plan = fixed_plan(config)
        degrees = plan.backbone.degrees
        setup = times.setup
        replica, per_node = np.array([degrees.replica_size]), times.device.devices_per_node
        shards = int(num_shards(setup, np.array([degrees.dp]), replica, per_node)[0]) or degrees.dp
        self._config, self._planned, self._times, self._degrees = config, planned, times, degrees
        self._actions = ActionTimes(times, degrees, shards)
        self._encoder = next(iter(config.encoders))
        self._partition: Partition = configured_partition(config, planned.model, degrees.pp)
        self._simulator = StepSimulator(self._partition, self._actions, self._encoder)
        lengths = planned.workload.lengths.astype(np.float64)
        self._squares, self._ragged = (
            float(each.sum() / lengths.sum()) for each in (np.square(lengths), ragged_squares(lengths))
        )
        specs = actor_specs_of(plan)
        self._on_cpu = times.device.name == CPU
        self._gathers_once = setup.sharding == "gradients"
        self._with_encoders = config.mode == "colocated" or plan.is_shared
        self._shares = self._with_encoders or (config.mode == "monolithic" and self._on_cpu)
        # Ranks of a tensor parallel group do the same at the same time: where devices are shared, one stands for all.
        traced = [spec for spec in specs if not self._with_encoders or spec.index % degrees.tp == 0]
        self._modules = {spec.name: spec.module for spec in traced}
        self._places = {spec.name: str(spec.index) if self._with_encoders else spec.name for spec in traced}
        self._replicas = {str(index): degrees.coordinates(index)[0] for index in range(degrees.world_size)}
        self._stage_steps: _Steps = defaultdict(list)
        self._device_steps: _Steps = defaultdict(list)

    def add(self, step: TracedStep, pairs: Pairs) -> bool:
        """Add what a step's spans took and should have taken; add nothing, and return False, if it cannot count."""
        by_actor = self._by_actor(step)
        if not self._is_whole(by_actor):
            return False
        shared: defaultdict[str, _Shared] = defaultdict(_Shared)
        meetings: _Meetings = defaultdict(list)
        for actor, spans in by_actor.items():
            if self._modules[actor] == BACKBONE:
                self._add_rank(step, _passes_and_updates(spans), pairs, shared[self._places[actor]], meetings)
            else:
                self._add_encoder(step, actor, spans, pairs, shared[self._places[actor]])
        if self._degrees.dp > 1:
            pairs.joined += map(tuple, meetings.values())
        else:
            pairs.ends += chain.from_iterable(meetings.values())
        if self._shares:
            for place, each in self._of_the_last(shared).items():
                backbone_s = each.layers_s + each.head_s
                added = encoding_adds_s(np.array(each.encoder_s), np.array(backbone_s), self._slowdown)
                half = (float(added) - each.encoder_s) / 2.0  # each slows the other down
                measured = _without(step.seconds_of(each.spans), each.fetching_s)
                parts = each.layers_s + half, each.head_s, each.encoder_s + half
                self._device_steps[place].append((measured, parts, len(each.spans)))
        return True

    def end(self, pairs: Pairs) -> None:
        """Add what is known once all steps were added."""
        for steps, found in ((self._stage_steps, pairs.stages), (self._device_steps, pairs.devices)):
            found += (total for total in map(DeviceTotal.of, steps.values()) if total is not None)

    def remainder_s(self, step: TracedStep) -> float | None:
        """Return what a step takes beyond its ranks' work and their waits for data; None if that is not known.

        The work is as predicted: passes that vary also make ranks wait for each other, which no pass tells. Where
        encoders share the ranks' devices, it is as measured. Negative in a step that was faster than predicted.
        """
        by_actor = self._by_actor(step)
        if not self._is_whole(by_actor):
            return None
        busy_s = self._shared_s(step, by_actor) if self._with_encoders else self._lists_s(by_actor)
        return None if busy_s is None else step.seconds - step.starved_s - busy_s

    def _by_actor(self, step: TracedStep) -> dict[str, list[Span]]:
        found: defaultdict[str, list[Span]] = defaultdict(list)
        for span in step.spans:
            actor = span.actor.split(" ")[0]  # emulated ones say so
            if actor in self._modules:
                found[actor].append(span)
        return found

    def _is_whole(self, by_actor: Mapping[str, Sequence[Span]]) -> bool:
        """Whether no stage has a microbatch twice, as beside an evaluation, or where a step was begun again."""
        for actor, spans in by_actor.items():
            if self._modules[actor] == BACKBONE:
                passes = [span for span in spans if span.name in (FORWARD, BACKWARD)]
                keys = [(span.name, span.args["stage"], span.args["microbatch"]) for span in _of_backbone(passes)]
                if len(set(keys)) < len(keys):
                    return False
        return True

    def _shared_s(self, step: TracedStep, by_actor: Mapping[str, Sequence[Span]]) -> float | None:
        """Measured seconds in which a mean replica's devices do anything; None with pipeline ranks, which wait."""
        if self._degrees.pp > 1:
            return None
        replicas: defaultdict[int, list[Span]] = defaultdict(list)
        for actor, spans in by_actor.items():
            of_rank = self._modules[actor] == BACKBONE
            replicas[self._replicas[self._places[actor]]] += (
                _passes_and_updates(spans) if of_rank else self._encoding(spans)
            )
        return fmean(step.seconds_of(spans) for spans in replicas.values())

    def _lists_s(self, by_actor: Mapping[str, Sequence[Span]]) -> float | None:
        """Predicted seconds of the ranks' action lists and updates; None if these or their trace are not known."""
        pipeline, degrees = self._config.pipeline, self._degrees
        if pipeline.policy == "pipetune" and degrees.pp > 1:
            return None  # its lists were searched for each step
        ranks = {_coordinates(actor): spans for actor, spans in by_actor.items() if self._modules[actor] == BACKBONE}
        sizes: list[dict[int, tuple[int, int]]] = [{} for _ in range(degrees.dp)]
        for (replica, _, _), spans in ranks.items():
            for span in spans:
                if span.name in (FORWARD, BACKWARD):
                    number, images = int(span.args["microbatch"]), int(span.args.get("images", 0))
                    _, known = sizes[replica].get(number, (0, 0))
                    sizes[replica][number] = int(span.args["num_tokens"]), max(images, known)
        counts = {len(each) for each in sizes}
        are_whole = all(each.keys() == set(range(len(each))) for each in sizes)
        if len(ranks) < degrees.world_size or len(counts) > 1 or 0 in counts or not are_whole:
            return None  # a part of the step's spans is not in the trace
        program = self._simulator.named(pipeline.schedule, counts.pop(), degrees.dp)
        columns = np.array([each[number] for each in sizes for number in sorted(each)], dtype=np.int64)
        works = self._columns(columns[:, 0].astype(np.float64), columns[:, 1])
        seconds, transfers = self._simulator.durations(program, works)
        timeline = Timeline(program, seconds, transfers, buffered=self._on_cpu)
        return timeline.makespan_s + self._simulator.optimizer_s()

    def _of_the_last(self, shared: Mapping[str, _Shared]) -> dict[str, _Shared]:
        """Of devices whose replicas meet in a step, that with the most to do: the others' spans have waits for it."""
        found: dict[tuple[int, ...], str] = {}
        for place, each in shared.items():
            coordinates = self._degrees.coordinates(int(place)) if self._with_encoders else _coordinates(place)
            _, *key, tp_rank = coordinates
            if tp_rank:
                continue  # ranks of a tensor parallel group do the same
            if tuple(key) not in found or each.predicted_s > shared[found[tuple(key)]].predicted_s:
                found[tuple(key)] = place
        return {place: shared[place] for place in found.values()}

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _add_rank(
        self, step: TracedStep, spans: Sequence[Span], pairs: Pairs, shared: _Shared, meetings: _Meetings
    ) -> None:
        passes: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
        for span in spans:
            if span.name == UPDATE:
                pairs.add(UPDATE, *self._update_s(step, span))
            else:
                passes[str(span.args["module"]), int(span.args["stage"])].append(span)
        for (module, number), found in passes.items():
            stage = self._partition.of_module(StageModule(module))[number]
            found.sort(key=lambda span: span.start_s)
            layers, head, saved = self._computing_s(stage, found)
            collectives, fetching = self._collectives_s(stage, found, layers + head), self._fetching_s(stage, found)
            layers -= saved
            if self._shares:
                shared.spans += found
                shared.layers_s += float(collectives.sum())
                shared.head_s += float(head.sum())
                shared.fetching_s += float(fetching.sum())
                if stage.module is StageModule.ENCODER:
                    shared.encoder_s += float(layers.sum())
                else:
                    shared.layers_s += float(layers.sum())
                continue
            own = (_without(step.seconds_of([span]), each) for span, each in zip(found, fetching, strict=True))
            took, known = [], []
            predicted = zip(layers.tolist(), head.tolist(), collectives.tolist(), strict=True)
            for span, measured, (of_layers, of_head, joined) in zip(found, own, predicted, strict=True):
                if stage.module is StageModule.ENCODER:
                    pairs.add(self._encoder, measured, of_layers + joined)
                elif joined > 0.0:
                    is_backward = span.name == BACKWARD
                    key = (*_coordinates(span.actor)[1:], number, int(span.args["microbatch"]), int(is_backward))
                    meets_first = self._gathers_once and not is_backward
                    start_s = span.start_s / step.scale
                    meetings[key].append(JoinedPass(start_s, measured, of_layers, of_head, joined, meets_first))
                else:
                    took.append(measured)
                    known.append((of_layers, of_head))
            # Together: forwards, backwards, and a step's first and last passes differ in how far predictions are off,
            # and which of them are the fewest would pass for outliers.
            if took:
                parts = tuple(map(sum, zip(*known, strict=True)))
                self._stage_steps[f"{module} {number}"].append((sum(took), parts, len(took)))

    def _update_s(self, step: TracedStep, span: Span) -> tuple[float, float]:
        """Measured and predicted seconds of an update, without the exchange of a tied table's gradients before it."""
        _, rank, _ = _coordinates(span.actor)
        works = [stage_work(self._partition, each, self._encoder) for each in self._partition.of_rank(rank)]
        tied = self._actions.tied_s(works)
        return _without(step.seconds_of([span]), tied), self._actions.optimizer_s(works) - tied

    def _computing_s(self, stage: Stage, spans: Sequence[Span]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds of computing without the head, of the head, and of the first what a first backward takes less.

        spans: a stage's of one rank and step.
        """
        tokens = np.array([float(span.args["num_tokens"]) for span in spans])
        images = np.array([int(span.args.get("images", 0)) for span in spans])
        work = stage_work(self._partition, stage, self._encoder)
        columns, are_backward = self._columns(tokens, images), self._are_backward(spans)
        whole, layers = (
            np.where(are_backward, *reversed(self._actions.passes_s(each, columns)))
            for each in (work, replace(work, is_last=False))
        )
        begin, saved = np.flatnonzero(are_backward)[:1], np.zeros(len(spans))
        saved[begin] = np.minimum(self._actions.first_backward_s(work, whole[begin]), layers[begin])
        return layers, whole - layers, saved

    def _columns(self, tokens: FloatArray, images: IntArray) -> MicrobatchColumns:
        """Microbatches of so many tokens and images, with the data's mean mix."""
        data = self._planned.workload
        return MicrobatchColumns(
            tokens,
            self._squares * tokens,
            self._ragged * tokens,
            data.vision_share * tokens,
            data.target_share * tokens,
            np.full(images.sum(), self._mean_patches(self._encoder)),
            images,
        )

    def _collectives_s(self, stage: Stage, spans: Sequence[Span], computing: FloatArray) -> FloatArray:
        """Seconds of collectives that computing does not hide; spans: a stage's of one rank and step, in order."""
        are_backward = self._are_backward(spans)
        are_first, are_last = np.zeros_like(are_backward), np.zeros_like(are_backward)
        are_first[np.flatnonzero(~are_backward)[:1]] = True
        are_last[np.flatnonzero(are_backward)[-1:]] = True
        return self._simulator.exposed_s(stage, Passes(are_backward, are_last, are_first), computing)

    def _fetching_s(self, stage: Stage, spans: Sequence[Span]) -> FloatArray:
        """Seconds of each span in which a core that is the device fetches a microbatch; arguments as above."""
        seconds, fetched = np.zeros(len(spans)), set[int]()
        if stage is self._partition.of_rank(stage.rank)[0]:
            for at, span in enumerate(spans):
                number = int(span.args["microbatch"])
                if span.name == FORWARD and number not in fetched:
                    fetched.add(number)
                    seconds[at] = self._actions.microbatch_s
        return seconds

    @staticmethod
    def _are_backward(spans: Sequence[Span]) -> BoolArray:
        return np.array([span.name == BACKWARD for span in spans])

    # --- encoders ---------------------------------------------------------------------------------------------------

    def _add_encoder(self, step: TracedStep, actor: str, spans: Sequence[Span], pairs: Pairs, shared: _Shared) -> None:
        name = self._modules[actor]
        tp = self._config.encoders[name].tensor_parallel_size
        work = self._encoding(spans)
        num_images = sum(int(span.args.get("images", 0)) for span in work if span.name == ENCODE)
        patches = np.full(num_images, self._mean_patches(name))
        predicted = float(self._times.each_forward_s(name, patches, tp).sum())
        if self._shares:
            shared.spans += work
            shared.encoder_s += predicted
        else:
            pairs.add(name, step.seconds_of(work), predicted)

    def _encoding(self, spans: Iterable[Span]) -> list[Span]:
        """An encoder's spans in which its device works.

        A CPU decodes images with the cores that forward them; an accelerator's host does it meanwhile.
        """
        return [span for span in spans if span.name == ENCODE or (self._on_cpu and span.name == DECODE)]

    def _mean_patches(self, encoder: str) -> int:
        """Of an image."""
        num_images, num_patches = self._planned.workload.images[encoder]
        return max(1, round(float(num_patches.sum()) / max(1, int(num_images.sum()))))

    @property
    def _slowdown(self) -> float:
        """Of encoder and rank while both compute on one device."""
        return self._times.slowdown(self._encoder) if self._with_encoders else 1.0


def _passes_and_updates(spans: Iterable[Span]) -> list[Span]:
    """A rank's spans without those of its decoding threads."""
    return [span for span in spans if span.name != DECODE]


def _without(measured_s: float, known_s: float) -> float:
    """Seconds without those of a part that has no factor."""
    return max(measured_s - known_s, LEAST * measured_s)


def _of_backbone(spans: Iterable[Span]) -> Iterator[Span]:
    """Passes of the backbone's stages; one of an encoder's may have several parts of a microbatch."""
    return (span for span in spans if span.args["module"] == StageModule.BACKBONE.value)


def _coordinates(actor: str) -> tuple[int, int, int]:
    """Data, pipeline and tensor parallel rank of a backbone actor, by its name."""
    found = _COORDINATES.match(actor)
    assert found is not None, actor
    return int(found[1]), int(found[2]), int(found[3])


_Meetings = defaultdict[tuple[int, ...], list[JoinedPass]]
"""Passes with collectives by pipeline and tensor parallel rank, stage, microbatch, and whether they are backwards."""
_Steps = defaultdict[str, list[tuple[float, Sequence[float], int]]]
"""Of each stage or device its steps, as ``DeviceTotal.of`` takes them."""


@dataclass(slots=True)
class _Shared:
    """What a device did in a step."""

    spans: list[Span] = field(default_factory=list)
    layers_s: float = 0.0
    """Predicted, of the backbone without the head."""
    head_s: float = 0.0
    encoder_s: float = 0.0
    fetching_s: float = 0.0
    """Likewise, of microbatches; no factor's."""

    @property
    def predicted_s(self) -> float:
        return self.layers_s + self.head_s + self.encoder_s


def traced_steps(spans: Sequence[Span], lines: Sequence[dict[str, Any]], scale: float) -> Iterator[TracedStep]:
    """Yield steps whose updates are in a trace; the first one after a start, in which everything is made, is left out.

    lines: of the run's metrics. A run that goes on has a trace of its new steps alone.
    """
    work = sorted((each for each in spans if each.name in WORK), key=lambda each: each.end_s)
    ends = np.array([each.end_s for each in work])
    begin = min((each.start_s for each in work), default=0.0)
    for before, line in pairwise(line for line in lines if line["timestamp"] > begin):
        first, last = np.searchsorted(ends, [before["timestamp"], line["timestamp"]], side="right")
        inside = tuple(work[first:last])
        if any(each.name == UPDATE for each in inside):
            yield TracedStep(line["step_time_s"], line["starved_s"], inside, scale)
