"""The partition that ``pipeline.partition`` names by a word: layers by number, parameters or time, or searched.

``balanced`` is OmniBal's search (4.2): each layer's time gives the anchor, the cuts around it are ranked by how even
their stages are and how much they send, and the best are simulated. The paper measures these in training steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import DeviceType, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.layer_costs import LayerCosts, layer_costs
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile, configured_profile
from flowtrain.costs.profiled_times import CPU
from flowtrain.errors import ConfigError
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import VISION_SHARE, configured_partition
from flowtrain.pipeline.cuts import NUM_CANDIDATES, RADIUS, named_cut, profile_cut, ranked_cuts
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import ScheduleName
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees

_ASSUMED_DEVICE = "h200"
"""Gives the proportions of layers' times where no profile and no type of accelerator is configured."""
_IMAGE_PATCHES = 1024
"""Patches of an image in the microbatch that partitions are timed with."""
_MICROBATCHES_PER_RANK = 4
"""Of the simulated step, for each pipeline rank."""


@dataclass(frozen=True, slots=True)
class TimedPartition:
    """A candidate."""

    counts: tuple[int, ...]
    """Layers of each stage, as in ``pipeline.partition``."""
    step_s: float
    """Simulated."""


def searched_partitions(
    costs: LayerCosts,
    num_stages: int,
    step_s: Callable[[tuple[int, ...]], float],
    *,
    radius: int = RADIUS,
    keep: int = NUM_CANDIDATES,
) -> list[TimedPartition]:
    """Return the best ranked partitions and the anchor, the fastest first.

    step_s: returns the seconds of a step with so many layers on each stage.
    """
    cuts = dict.fromkeys([*ranked_cuts(costs, num_stages, radius=radius, keep=keep), profile_cut(costs, num_stages)])
    timed = [TimedPartition(counts, step_s(counts)) for counts in map(costs.counts, cuts)]
    return sorted(timed, key=lambda each: each.step_s)


def simulated_step_s(
    partition: Partition,
    times: ActionTimes,
    works: Sequence[MicrobatchWork],
    *,
    encoder: str = "",
    schedule: ScheduleName = "1f1b",
    recomputed: Mapping[tuple[StageModule, int], int | None] | None = None,
) -> float:
    """Return the seconds of one replica's step with these microbatches, without the update.

    times: of one replica. encoder, recomputed: as of ``StepSimulator``.
    """
    simulator = StepSimulator(partition, times, encoder, times.times.device.name == CPU, recomputed)
    program = simulator.named(schedule, len(works), 1)
    return Timeline(
        program, *simulator.durations(program, MicrobatchColumns.of(works)), buffered=simulator.buffered
    ).makespan_s


def with_chosen_partition(config: RunConfig, model: ModelSpec) -> RunConfig:
    """Return the configuration with numbers in the place of a word in ``pipeline.partition``.

    The same wherever it is called: times are those of the configured profile, else of data sheets. Raises ConfigError
    if the layers cannot be cut, or the profile cannot be read.
    """
    pipeline, pp = config.pipeline, config.backbone.pipeline_parallel_size
    if not isinstance(pipeline.partition, str):
        return config
    num_stages = pp * pipeline.chunks
    whole = configured_partition(config, model, pp)  # refuses more stages than layers
    if num_stages == 1:
        return _with_counts(config, None)
    name = next(iter(model.encoders)) if config.mode == "monolithic" else ""
    times = _times(config, model)
    work = _microbatch(config, model, name, times.times.profile)
    place = pipeline.encoder_layers
    costs = layer_costs(
        times,
        work,
        encoder=name if name and place != "own" else None,
        is_cut=place == "mixed",
        trains=config.trains_encoders,
    )
    if pipeline.partition != "balanced":
        return _with_counts(config, costs.counts(named_cut(pipeline.partition, costs, num_stages)))
    works = [work] * (_MICROBATCHES_PER_RANK * whole.pp_size)

    def step_s(counts: tuple[int, ...]) -> float:
        partition = configured_partition(_with_counts(config, counts), model, pp)
        return simulated_step_s(partition, times, works, encoder=name, schedule=pipeline.schedule)

    return _with_counts(config, searched_partitions(costs, num_stages, step_s)[0].counts)


def _with_counts(config: RunConfig, counts: tuple[int, ...] | None) -> RunConfig:
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"partition": counts})})


def _times(config: RunConfig, model: ModelSpec) -> ActionTimes:
    """Those of one replica."""
    backbone, profile = config.backbone, configured_profile(config)
    degrees = Degrees(1, backbone.pipeline_parallel_size, backbone.tensor_parallel_size)
    if profile is not None:
        device = profile.devices(degrees.world_size, profile.known_facts.devices_per_node)
    else:
        device = _data_sheet(config, degrees.world_size)
    times = DeviceTimes(
        device,
        model,
        configured_setup(config, on_cpu=device.name == CPU),
        config.frozen_modules,
        profile,
        {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        {name: encoder.decode_threads for name, encoder in config.encoders.items()},
        OperatorRules.of(config.costs),
    )
    return ActionTimes(times, degrees, 1)


def _data_sheet(config: RunConfig, count: int) -> DeviceType:
    """The configured type of accelerator; one of the table if there is none, or without a peak in the run's type."""
    name = config.backbone.accelerator_type
    if name is None and config.emulation is not None:
        name = config.emulation.device
    try:
        return data_sheet_device_type(name or _ASSUMED_DEVICE, count, dtype=config.model.dtype)
    except ConfigError:
        return data_sheet_device_type(_ASSUMED_DEVICE, count, dtype=config.model.dtype)


def _microbatch(config: RunConfig, model: ModelSpec, encoder: str, profile: Profile | None) -> MicrobatchWork:
    """A full microbatch, half of whose tokens are images'; no image is larger than those that a profile measured."""
    tokens, longest = config.scheduler.microbatch_tokens, config.data.max_seq_len
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    rows = int(VISION_SHARE * tokens)
    patches: list[int] = []
    if encoder:
        every = rows * model.encoders[encoder].patches_per_row
        tables = profile.encoders.get(encoder, {}).values() if profile is not None else ()
        num_images = math.ceil(every / min([_IMAGE_PATCHES, *(table.num_patches[-1] for table in tables)]))
        patches = [every // num_images] * num_images if every else []
    return MicrobatchWork(tuple(lengths), rows, tokens // 2, tuple(patches))
