"""The whole configuration, and the checks that need more than one role."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, ValidationError, model_validator

from flowtrain.config.allocator import PLANNER_CHOICES, AllocatorConfig, PlannerChoice
from flowtrain.config.base import ConfigModel
from flowtrain.config.costs import CostsConfig
from flowtrain.config.data import DataConfig, grouping_has_its_order
from flowtrain.config.emulated import EmulatedConfig, emulation_is_asked_for
from flowtrain.config.evaluation import best_is_known, eval_sets_have_names
from flowtrain.config.families import family_reads_its_keys
from flowtrain.config.flow import LimitsConfig, ObservabilityConfig, PoolConfig, SchedulerConfig
from flowtrain.config.messages import Document, refused
from flowtrain.config.model import BackboneConfig, ConnectorConfig, EncoderConfig, ModelConfig
from flowtrain.config.modes import (
    auto_is_free,
    colocated_devices_are_shared,
    colocated_encoders_fit_their_ranks,
    encoder_memory_is_of_trained_layers,
    encoders_are_trained_inside,
    ranks_have_whole_devices,
)
from flowtrain.config.module_values import module_values_are_possible
from flowtrain.config.parameter_names import ENCODERS, is_pattern
from flowtrain.config.pipeline import PipelineConfig, partition_has_its_stages, schedule_has_its_chunks
from flowtrain.config.put_plan import put_plan
from flowtrain.config.training import CheckpointConfig, TrainingConfig
from flowtrain.errors import ConfigError, Fault, FaultCode
from flowtrain.types.run_plan import ENCODER_MODES, Mode, ModeChoice, Plan
from flowtrain.types.samples import IMAGES_PART, TEXT_PART

MAX_REGION_NBYTES = 1 << 59
"""Addresses of one tier of the pool (``mempool/gva.py``)."""


class RunConfig(ConfigModel):
    """One training run, as written in one YAML file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """The run's directory is ``<runs_dir>/<name>``."""
    runs_dir: str = "runs"
    seed: int = Field(0, ge=0, le=2**63)
    """Decides the order of the data and random initial weights."""
    mode: ModeChoice = "decoupled"
    """How encoders and backbone share devices and time (docs/modes.md). ``auto``: the one that ``flowtrain plan``
    predicts to be the fastest on the devices at hand."""
    model: ModelConfig = ModelConfig()
    emulated: EmulatedConfig | None = None
    """None: its defaults with ``model.device: emulated``."""
    encoders: dict[str, EncoderConfig] = Field(min_length=1)
    """Encoders by name. A run can have one; ``flowtrain plan`` plans several."""
    connector: ConnectorConfig = ConnectorConfig()
    backbone: BackboneConfig = BackboneConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig
    training: TrainingConfig = TrainingConfig(max_steps=1000)
    scheduler: SchedulerConfig = SchedulerConfig()
    pool: PoolConfig = PoolConfig()
    allocator: AllocatorConfig = AllocatorConfig()
    costs: CostsConfig = CostsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _across_roles(self) -> RunConfig:
        checks = (
            _capacity_holds_a_sample,
            _batch_feeds_every_rank,
            _a_frozen_cost_is_given,
            _encoder_names,
            _source_names,
            grouping_has_its_order,
            eval_sets_have_names,
            best_is_known,
            _not_yet_parallel,
            _split_encoders_have_a_place,
            ranks_have_whole_devices,
            auto_is_free,  # before checks of what it leaves out
            schedule_has_its_chunks,
            partition_has_its_stages,
            encoders_are_trained_inside,
            encoder_memory_is_of_trained_layers,
            colocated_encoders_fit_their_ranks,
            colocated_devices_are_shared,
            _shard_size_has_hybrid_sharding,
            _segments_fit_the_space,
            _processes_fit_the_space,
            _hbm_has_a_device,
            _exchange_is_possible,
            _modules_have_an_origin,
            module_values_are_possible,
            family_reads_its_keys,
            emulation_is_asked_for,
        )
        fault = next((fault for check in checks for fault in check(self)), None)
        if fault is not None:
            raise ConfigError(fault.text, [fault])
        return self

    @property
    def saves_at_end(self) -> bool:
        """Whether the last step gets a checkpoint; emulated devices have no weights."""
        return self.checkpoint.at_end and self.emulation is None

    @property
    def has_encoder_actors(self) -> bool:
        """Whether actors of their own run the encoders."""
        return self.settled_mode in ENCODER_MODES

    @property
    def step_scheduler(self) -> SchedulerConfig:
        """The ``scheduler`` section by which steps are laid out: ``pipeline.policy`` may replace its packing."""
        if self.pipeline.policy != "balanced":
            return self.scheduler
        return self.scheduler.model_copy(update={"packing": "balanced"})

    @property
    def settled_mode(self) -> Mode:
        """The mode; with ``auto`` the one by which the configuration is read before a plan decides."""
        if self.mode == "auto":
            return "monolithic" if self.trains_encoders else "decoupled"
        return self.mode

    @property
    def settled(self) -> RunConfig:
        """The configuration with ``settled_mode``."""
        return self if self.mode != "auto" else self.model_copy(update={"mode": self.settled_mode})

    @property
    def emulation(self) -> EmulatedConfig | None:
        """The emulated devices; None if devices are real."""
        return (self.emulated or EmulatedConfig()) if self.model.device == "emulated" else None

    @property
    def planner_choices(self) -> frozenset[PlannerChoice]:
        """What a plan chooses besides the degrees (``allocator.choose``)."""
        choose = self.allocator.choose
        if choose == "all" or (choose == "auto" and self.mode == "auto"):
            return frozenset(PLANNER_CHOICES)
        return frozenset(() if choose == "auto" else choose)

    @property
    def exchanges_units(self) -> bool:
        """Whether encoders send features unit by unit (``pool.exchange: point_to_point``)."""
        return self.has_encoder_actors and self.pool.exchange == "point_to_point"

    @property
    def trains_encoders(self) -> bool:
        """Whether an encoder is trained."""
        return any(encoder.trainable for encoder in self.encoders.values())

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        """Modules that are frozen as a whole: those that ``model.freeze`` names, and ``encoders`` unless trainable."""
        modules = tuple(key for key in self.model.freeze if not is_pattern(key))
        return modules if self.trains_encoders else (*modules, ENCODERS)

    def encoder_replicas(self, name: str) -> int:
        """Return the data parallel size of an encoder's actors: as configured, or as ``colocated`` needs; 0 without."""
        if not self.has_encoder_actors:
            return 0
        encoder, backbone = self.encoders[name], self.backbone
        if self.mode != "colocated":
            return encoder.data_parallel_size
        ranks = backbone.data_parallel_size * backbone.pipeline_parallel_size * backbone.tensor_parallel_size
        return max(1, ranks // encoder.tensor_parallel_size)

    def with_plan(self, plan: Plan) -> RunConfig:
        """Return the configuration with a plan's degrees, resources and segments; ConfigError if they do not fit it."""
        values = self.model_dump()
        origins = put_plan(values, plan)
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            raise refused(Document(f"run {self.name!r} with this plan", values, overrides=origins), error) from error


def _capacity_holds_a_sample(config: RunConfig) -> Iterator[Fault]:
    if config.data.max_seq_len > config.scheduler.microbatch_tokens:
        yield Fault(
            "data.max_seq_len",
            FaultCode.CONFLICT,
            f"data.max_seq_len ({config.data.max_seq_len}) is larger than scheduler.microbatch_tokens "
            f"({config.scheduler.microbatch_tokens}): a sample of that length would fit no microbatch; lower the first "
            "or raise the second",
        )


def _batch_feeds_every_rank(config: RunConfig) -> Iterator[Fault]:
    dp_size, batch = config.backbone.data_parallel_size, config.training.global_batch_size
    if batch < dp_size:
        yield Fault(
            "backbone.data_parallel_size",
            FaultCode.DEGREES,
            f"training.global_batch_size ({batch}) is smaller than backbone.data_parallel_size ({dp_size}): some "
            "ranks would never get a sample; raise the first or lower the second",
        )


def _a_frozen_cost_is_given(config: RunConfig) -> Iterator[Fault]:
    order, scheduler = config.data.order, config.scheduler
    if scheduler.cost == "profile" and scheduler.cost_profile is None and order == "deterministic":
        yield Fault(
            "scheduler.cost_profile",
            FaultCode.CONFLICT,
            f"scheduler.cost ('profile') needs scheduler.cost_profile with data.order ({order!r}), whose costs are "
            "fixed from the start; give the profile.json that an earlier run of this model wrote into its "
            "directory, or set data.order to 'arrival', which fits costs during the run",
        )


def _encoder_names(config: RunConfig) -> Iterator[Fault]:
    for name in config.encoders:
        if name in (TEXT_PART, IMAGES_PART) or not name.isidentifier():
            yield Fault(
                f"encoders.{name}",
                FaultCode.ENCODERS,
                f"encoders: {name!r} is not a valid encoder name; use an identifier other than {TEXT_PART!r} and "
                f"{IMAGES_PART!r}",
            )


def _source_names(config: RunConfig) -> Iterator[Fault]:
    names: dict[str, int] = {}
    for index, source in enumerate(config.data.sources):
        if source.name is not None and names.setdefault(source.name, index) != index:
            yield Fault(
                f"data.sources.{index}.name",
                FaultCode.CONFLICT,
                f"data.sources.{index}.name ({source.name!r}) is the name of data.sources.{names[source.name]} too, so "
                "that ledger and quarantine could not tell them apart; give it another name",
            )


def _not_yet_parallel(config: RunConfig) -> Iterator[Fault]:
    degree = config.backbone.context_parallel_size
    if degree > 1:
        yield Fault(
            "backbone.context_parallel_size",
            FaultCode.DEGREES,
            f"backbone.context_parallel_size ({degree}) above 1 is not supported yet; set it to 1, and use "
            "backbone.tensor_parallel_size and backbone.activation_checkpointing for long sequences",
        )


def _split_encoders_have_a_place(config: RunConfig) -> Iterator[Fault]:
    if not config.has_encoder_actors:
        return
    for name, encoder in config.encoders.items():
        if encoder.tensor_parallel_size > 1 and not encoder.num_cpus:
            yield Fault(
                f"encoders.{name}.num_cpus",
                FaultCode.CONFLICT,
                f"encoders.{name}.tensor_parallel_size ({encoder.tensor_parallel_size}) above 1 needs "
                f"encoders.{name}.num_cpus (0) above 0: Ray places its actors on one node by the CPUs they reserve; "
                "a fraction is enough",
            )


def _shard_size_has_hybrid_sharding(config: RunConfig) -> Iterator[Fault]:
    backbone = config.backbone
    if backbone.hybrid_shard_size is not None and backbone.sharding != "hybrid":
        yield Fault(
            "backbone.hybrid_shard_size",
            FaultCode.CONFLICT,
            f"backbone.hybrid_shard_size ({backbone.hybrid_shard_size}) needs backbone.sharding 'hybrid' (now "
            f"{backbone.sharding!r}); set that, or unset the size with =null",
        )


def _segments_fit_the_space(config: RunConfig) -> Iterator[Fault]:
    limit = config.pool.max_segment_nbytes
    sizes = {
        "pool.feeder_segment_nbytes": config.pool.feeder_segment_nbytes or 0,
        "pool.hbm_segment_nbytes": config.pool.hbm_segment_nbytes,
    }
    sizes |= {f"encoders.{name}.segment_nbytes": e.segment_nbytes for name, e in config.encoders.items()}
    for key, nbytes in sizes.items():
        if nbytes > limit:
            yield Fault(
                key,
                FaultCode.POOL,
                f"{key} ({nbytes}) is larger than pool.max_segment_nbytes ({limit}); raise the second",
            )


def _processes_fit_the_space(config: RunConfig) -> Iterator[Fault]:
    backbone, limit = config.backbone, config.pool.max_processes
    if limit * config.pool.max_segment_nbytes > MAX_REGION_NBYTES:
        yield Fault(
            "pool.max_segment_nbytes",
            FaultCode.POOL,
            f"pool.max_processes ({limit}) times pool.max_segment_nbytes ({config.pool.max_segment_nbytes}) is more "
            f"than an address space of 64 bits has for a tier ({MAX_REGION_NBYTES} bytes); lower one of them",
        )
    ranks = backbone.data_parallel_size * backbone.pipeline_parallel_size * backbone.tensor_parallel_size
    encoders = sum(map(config.encoder_replicas, config.encoders))
    needed = ranks + encoders + (config.data.num_feeders or 1)
    if needed > limit:
        yield Fault(
            "pool.max_processes",
            FaultCode.POOL,
            f"pool.max_processes ({limit}) is less than the {needed} processes of the pool (backbone ranks, encoders, "
            "feeders); raise it to at least pool.processes_per_node times the number of nodes",
        )


def _hbm_has_a_device(config: RunConfig) -> Iterator[Fault]:
    pool, device = config.pool, config.model.device
    if pool.hbm_segment_nbytes and device != "auto":
        yield Fault(
            "pool.hbm_segment_nbytes",
            FaultCode.CONFLICT,
            f"pool.hbm_segment_nbytes ({pool.hbm_segment_nbytes}) is memory of accelerators, and model.device "
            f"({device!r}) uses none; set the first to 0 or the second to 'auto'",
        )
    if pool.hbm_low_watermark > pool.hbm_high_watermark:
        yield Fault(
            "pool.hbm_segment_nbytes",
            FaultCode.CONFLICT,
            f"pool.hbm_low_watermark ({pool.hbm_low_watermark:g}) is above pool.hbm_high_watermark "
            f"({pool.hbm_high_watermark:g}); lower the first or raise the second",
        )


def _exchange_is_possible(config: RunConfig) -> Iterator[Fault]:
    pool = config.pool
    if not config.exchanges_units:
        return
    if pool.network != "none":
        yield Fault(
            "pool.exchange",
            FaultCode.CONFLICT,
            f"pool.exchange ({pool.exchange!r}) works inside one node, and pool.network ({pool.network!r}) lets a run "
            "use several; set the second to 'none', or the first to 'pool'",
        )
    if pool.hbm_segment_nbytes:
        yield Fault(
            "pool.hbm_segment_nbytes",
            FaultCode.CONFLICT,
            f"pool.hbm_segment_nbytes ({pool.hbm_segment_nbytes}) is memory that others map, and pool.exchange "
            f"({pool.exchange!r}) maps none for features; set the first to 0",
        )


def _modules_have_an_origin(config: RunConfig) -> Iterator[Fault]:
    modules: dict[str, EncoderConfig | BackboneConfig] = {
        f"encoders.{name}": encoder for name, encoder in config.encoders.items()
    }
    modules["backbone"] = config.backbone
    for key, module in modules.items():
        given = [name for name in ("path", "config") if getattr(module, name) is not None]
        if len(given) == 2:
            yield Fault(key, FaultCode.CONFLICT, f"{key}.path and {key}.config are both given; keep one of them")
        elif config.model.path is not None and given:
            yield Fault(
                key,
                FaultCode.CONFLICT,
                f"model.path ({config.model.path}) is a whole checkpoint and {key}.{given[0]} is given too; keep one",
            )
        elif config.model.path is None and not given:
            yield Fault(
                key, FaultCode.CONFLICT, f"{key} needs a path or a config (or give model.path, a whole checkpoint)"
            )
