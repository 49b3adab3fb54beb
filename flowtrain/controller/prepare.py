"""The run spec: steps, sizes and plan of a run, checked before anything starts. No Ray."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.degrees import degree_faults, encoder_degree_faults
from flowtrain.allocator.plan import fixed_plan, with_settings_of
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.config.messages import refusal
from flowtrain.config.parameter_checks import names_parameters, parameter_faults
from flowtrain.config.parameter_names import ParameterNames
from flowtrain.config.run import RunConfig
from flowtrain.config.startable import check_startable
from flowtrain.controller.feeder_memory import FeederNeed, feeder_need
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profile import Profile
from flowtrain.costs.start_limit import start_limit
from flowtrain.data.feed import sampler_from_config, with_vision_quota
from flowtrain.data.sizing import Sizer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.emulation.check import check_emulated, check_emulated_profile
from flowtrain.errors import ConfigError, DataError, RefusedDataError
from flowtrain.flow.capacity import check_capacity, check_scattered_capacity
from flowtrain.flow.units import num_steps_of
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.tower_plans import TOWER_PLANS
from flowtrain.models.weights import check_builds
from flowtrain.observability.trackers.registry import check_trackers
from flowtrain.pipeline.configured import configured_memory, configured_partition
from flowtrain.pipeline.partition import Partition
from flowtrain.scheduler.run_cost import configured_costs, first_cost
from flowtrain.search.configured import configured_search
from flowtrain.search.partition import with_chosen_partition
from flowtrain.search.pipetune import PipeTune
from flowtrain.search.works import encodes_apart
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import CostModel, Degrees
from flowtrain.types.run_plan import Plan
from flowtrain.types.sources import SourceIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSpec:
    """Run spec: a run that can start."""

    config: RunConfig
    """With the numbers of ``pipeline.partition`` and the quota of ``data.grouping``."""
    plan: Plan
    """With the devices that actors take if the cluster has some."""
    model_spec: ModelSpec
    source_names: tuple[str, ...]
    indexes: tuple[SourceIndex, ...]
    """Files and blocks of the training sources, in the order of ``source_names``, then of the held-out sets."""
    evaluations: tuple[EvalRounds, ...]
    """Of each held-out set."""
    num_steps: int
    total_positions: int | None
    """``num_steps`` and ``total_positions``: as ``num_steps_of`` returns them."""
    cost: CostModel
    """Plans the first step."""
    cost_profile: Profile | None
    """The measured profile that ``cost`` comes from, or None."""
    partition_word: str | None = None
    """The word of ``pipeline.partition`` that the numbers in ``config`` stand for."""
    search: PipeTune | None = None
    """Of ``pipeline.policy``."""

    @property
    def partition(self) -> Partition:
        """Which layers lie on which pipeline rank."""
        return configured_partition(self.config, self.model_spec, self.plan.backbone.pipeline_parallel_size)

    @property
    def can_encode_ahead(self) -> bool:
        """Whether a search of steps may have the first rank encode images of later microbatches."""
        return self.config.pipeline.schedule == "1f1b" and encodes_apart(self.partition)

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Rows of each training source."""
        return tuple(index.num_rows for index in self.indexes[: len(self.source_names)])

    @property
    def feeder_need(self) -> FeederNeed:
        """What the segment of each feeder must hold."""
        return feeder_need(self.config, self.indexes, self.num_eval, self.plan.feeder.data_parallel_size)

    @property
    def num_eval(self) -> int:
        """Samples of the largest evaluation round, 0 for none."""
        return max((each.num_samples for each in self.evaluations), default=0)

    @property
    def warmup_warning(self) -> str | None:
        """What a user must know of a run that ends within its warmup; None if it does not, or if it trains nothing."""
        warmup_steps = self.config.training.warmup_steps
        if warmup_steps <= self.num_steps or self.config.emulation is not None:
            return None
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps:,} steps"
        return (
            f"training.warmup_steps is {warmup_steps:,}, and the run has {steps}: the learning rate never reaches "
            "training.learning_rate; lower the first, or train for more steps"
        )

    @property
    def epoch_positions(self) -> int:
        """Positions in one pass over the data."""
        return max(1, sum(self.source_sizes))


def prepare(config: RunConfig, check_pool: bool = True, plan: Plan | None = None) -> RunSpec:
    """Look at data and model headers; raises ConfigError or DataError if the run could not work.

    check_pool: also refuse a memory pool that is too small. plan: the plan that the configuration has its degrees from,
    whose choices of settings the run's plan records; None: they are its own.
    """
    check_startable(config)
    check_emulated(config)
    check_trackers(config.observability)
    indexes = _indexed(config)
    sources = SourceSet.from_config(config.data, indexes)
    if sum(sources.sizes) == 0:
        raise ConfigError(f"data.sources: {', '.join(s.name for s in sources.train)} have no rows")
    held_out = zip(config.data.eval_sets.values(), sources.all[len(sources.train) :], strict=True)
    evaluations = tuple([EvalRounds(each.every_steps, min(each.max_samples, len(rows))) for each, rows in held_out])
    config = with_vision_quota(config, sources.tables)
    num_eval = max((each.num_samples for each in evaluations), default=0)
    num_steps, total_positions = num_steps_of(config.training, sources.sizes)
    family = family_from_config(config)
    check_modules(config, family)
    check_parameter_names(config, family)
    spec = family.model_spec
    check_emulated_profile(config, spec)
    plan = with_settings_of(config, fixed_plan(config), plan)
    check_degrees(config, plan.backbone.degrees, spec, family.vision_config.model_type)
    word = config.pipeline.partition if isinstance(config.pipeline.partition, str) else None
    config = with_chosen_partition(config, spec)
    if plan.backbone.tensor_parallel_size > 1:
        family.check_tensor_parallel(plan.backbone.tensor_parallel_size)
    search = configured_search(config, spec)  # refuses a policy that needs times of unknown devices
    Sizer(family, family.tokenizer, config.data)  # refuses a chat template that cannot give exact labels
    need = feeder_need(config, indexes, num_eval, plan.feeder.data_parallel_size)
    if need.warning is not None:
        logger.warning(need.warning)
    if not plan.feeder.segment_nbytes:
        plan = replace(plan, feeder=replace(plan.feeder, segment_nbytes=need.nbytes))
    if check_pool:
        need.check(plan.feeder.segment_nbytes, config.pool.max_segment_nbytes)
        check_memory(config, family, num_eval)
    cost_profile = configured_costs(config, spec)
    return RunSpec(
        config=config,
        plan=plan,
        model_spec=spec,
        source_names=tuple(source.name for source in sources.train),
        indexes=indexes,
        evaluations=evaluations,
        num_steps=num_steps,
        total_positions=total_positions,
        cost=first_cost(config, spec, cost_profile),
        cost_profile=cost_profile,
        partition_word=word,
        search=search,
    )


def _indexed(config: RunConfig) -> tuple[SourceIndex, ...]:
    try:
        return SourceSet.index(config.data)
    except DataError as error:
        raise RefusedDataError(str(error)) from error


def check_modules(config: RunConfig, family: Family) -> None:
    """Raise ConfigError if a module that is given by its configuration cannot be built."""
    for name, encoder in config.encoders.items():
        if encoder.config is not None:
            check_builds(family.vision_config, f"encoders.{name}")
    if config.backbone.config is not None:
        check_builds(family.text_config, "backbone")


def check_parameter_names(config: RunConfig, family: Family) -> None:
    """Raise ConfigError, with all faults, if keys that name parameters do not fit the model or each other."""
    if not names_parameters(config):
        return
    names = ParameterNames.of([*family.weight_shapes(), *family.merged_connector()], family.tied_weights())
    if faults := parameter_faults(config, names):
        raise refusal(f"run {config.name!r}", faults)


def check_degrees(config: RunConfig, degrees: Degrees, spec: ModelSpec, tower_type: str) -> None:
    """Raise ConfigError, with all faults, if modules cannot be split as the configuration says.

    degrees: the backbone's. tower_type: ``model_type`` of the vision tower.
    """
    faults = degree_faults(degrees, spec.backbone, chunks_per_rank=config.pipeline.chunks)
    for name, encoder in config.encoders.items():
        if config.has_encoder_actors:
            tp = encoder.tensor_parallel_size
            faults += encoder_degree_faults(name, tp, spec.encoders[name], tower_type, TOWER_PLANS)
    if faults:
        raise refusal(f"run {config.name!r}", faults)
    try:
        configured_memory(config, configured_partition(config, spec, degrees.pp))
    except ConfigError as error:
        raise refusal(f"run {config.name!r}", error.faults) from error


def unsplittable(family: Family, spec: ModelSpec) -> frozenset[str]:
    """Return the modules whose kind of layers no tensor parallel degree can split."""
    towers = [] if family.vision_config.model_type in TOWER_PLANS else family.encoder_names
    heads = range(2, spec.backbone.num_heads + 1)
    even = next((tp for tp in heads if not degree_faults(Degrees(tp=tp), spec.backbone)), None)
    return frozenset(towers) | ({BACKBONE} if even is not None and not splits_tensors(family, even) else frozenset())


def splits_tensors(family: Family, tensor_parallel_size: int) -> bool:
    """Whether the kind of layers of a family's backbone can be split with this degree."""
    try:
        family.check_tensor_parallel(tensor_parallel_size)
    except ConfigError:  # no plan for its type, or a plan with an unknown style of splitting
        return False
    return True


def check_memory(
    config: RunConfig, family: Family, num_eval: int, num_encoders: Mapping[str, int] | None = None
) -> None:
    """Raise ConfigError unless the encoders' segments hold a worst-case unit; with less room a run could deadlock.

    num_encoders: replicas of each encoder; by default the configuration's. Without encoder actors there is nothing to
    check.
    """
    if not config.has_encoder_actors:
        return
    batch_size, by_arrival = config.training.global_batch_size, config.data.order == "arrival"
    samples = max(batch_size, num_eval)
    limit, align = config.data.max_seq_len, config.pool.alignment
    for name, encoder in config.encoders.items():
        # A lease takes a whole batch: at most the rows of one longest sample, or the batch's limit of patches. Each of
        # its parts is rounded up.
        patches_per_row = family.model_spec.encoders[name].patches_per_row
        rows = max(limit, -(-encoder.max_batch_patches // patches_per_row))
        batch_nbytes = rows * family.row_nbytes(name) + min(samples, encoder.max_batch_patches) * align
        # Two consecutive batches together exceed the limit of one, otherwise they would be one batch.
        num_batches = min(samples, 1 + -(-2 * samples * limit // rows))
        count = config.encoder_replicas(name) if num_encoders is None else num_encoders[name]
        segments, knob = [encoder.segment_nbytes] * count, f"encoders.{name}.segment_nbytes"
        check_capacity(segments, largest_part_nbytes=batch_nbytes, parts_per_step=num_batches, knob=knob)
        if by_arrival:
            held_nbytes = (batch_size - 1) * _aligned(limit * family.row_nbytes(name), align)
            check_scattered_capacity(segments, batch_nbytes, held_nbytes, knob)


def with_start_limit(run_spec: RunSpec, resumes: bool) -> RunSpec:
    """Set ``limits.start_timeout_s``, which actors read, by the model's size if it is None.

    resumes: from a checkpoint.
    """
    limits = run_spec.config.limits
    limit = start_limit(limits.start_timeout_s, run_spec.model_spec, resumes)
    limits = limits.model_copy(update={"start_timeout_s": limit.seconds})
    return replace(run_spec, config=run_spec.config.model_copy(update={"limits": limits}))


def memory_shortage(run_spec: RunSpec, encoders: Sequence[str]) -> str | None:
    """Describe what the pool cannot hold if only these encoders live; None if it suffices.

    encoders: the module of each living encoder.
    """
    config, left = run_spec.config, Counter(encoders)
    try:
        check_memory(config, family_from_config(config), run_spec.num_eval, left)
    except ConfigError as error:
        return str(error)
    return None


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def first_flow_settings(run_spec: RunSpec) -> FlowSettings:
    """Return the flow's start for a run that has trained nothing yet; a checkpoint replaces part of it."""
    degrees = run_spec.plan.backbone.degrees
    tables = [index.first_rows for index in run_spec.indexes[: len(run_spec.source_names)]]
    return FlowSettings(
        global_batch_size=run_spec.config.training.global_batch_size,
        dp_size=degrees.dp,
        num_steps=run_spec.num_steps,
        total_positions=run_spec.total_positions,
        start_step=0,
        sampler_state=sampler_from_config(run_spec.config, tables).state(),
        cost=run_spec.cost,
        num_rejected=0,
        num_seen=0,
        num_feeders=run_spec.plan.feeder.data_parallel_size,
        evaluations=run_spec.evaluations,
    )
