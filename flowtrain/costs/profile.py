"""The profile: all that was measured of a model on a device, in one file; read, checked against the run, interpolated.

``flowtrain profile`` measures modules before training (FlowTrain 3.3): one decoder layer and the head over packed
lengths, every encoder over image sizes and batches. Runs add the fitted cost of their microbatches, and ``flowtrain
calibrate`` the factors that a finished run's trace gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from flowtrain.config.parameter_names import is_pattern
from flowtrain.config.run import RunConfig
from flowtrain.costs.calibration import Calibration
from flowtrain.costs.cluster import DeviceType, Links, data_sheet_device_type
from flowtrain.costs.devices import device_spec
from flowtrain.costs.flops import FloatArray
from flowtrain.costs.microbatch_costs import MicrobatchCosts, leaves
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profile_layers import AttentionCosts, LossCosts, Strategies, check_axis
from flowtrain.costs.profile_together import HostCosts, Interference, ReplicaCosts, Sharded
from flowtrain.costs.profile_trials import Trial
from flowtrain.errors import ConfigError, FaultCode

PROFILE_SCHEMA = 3

_LIBRARIES = ("flowtrain", "torch", "transformers")

MAX_EXTRAPOLATION = 1.25
"""Lengths and sizes up to this many times the largest measured one are extrapolated in proportion."""

_ANY_TOKENS = 1 << 40

OR_NO_PROFILE = "or use no profile (rates are then from data sheets)"
MEASURE_AGAIN = f"run flowtrain profile again on these devices, {OR_NO_PROFILE}"
_CALIBRATE_AGAIN = "run flowtrain calibrate again with the measured profile, or remove calibration from this file"
_OTHER_FIELDS = ("missing", "unexpected_keyword_argument")
"""Pydantic's names of what is wrong in files of versions that measured less or more."""
_SHOWN = 3

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Positive = _Seconds
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Seconds over packed lengths, ascending; both ``[N]``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_tokens: tuple[_Size, ...]
    seconds: tuple[_Seconds, ...]

    def __post_init__(self) -> None:
        check_axis("num_tokens", self.num_tokens)
        if len(self.seconds) != len(self.num_tokens):
            raise ValueError(f"seconds has {len(self.seconds)} values for {len(self.num_tokens)} num_tokens")

    def __call__(self, num_tokens: FloatArray) -> FloatArray:
        """Interpolate linearly; constant below the shortest length, proportional to length above the longest."""
        inside = np.interp(num_tokens, self.num_tokens, self.seconds)
        return inside * np.maximum(num_tokens / self.num_tokens[-1], 1.0)


@dataclass(frozen=True, slots=True)
class ImageTable:
    """Seconds of one forward, ``[P, B]``, over patches of an image and images of a batch, both ascending."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_patches: tuple[_Size, ...]
    batch: tuple[_Size, ...]
    seconds: tuple[tuple[_Seconds, ...], ...]

    def __post_init__(self) -> None:
        check_axis("num_patches", self.num_patches)
        check_axis("batch", self.batch)
        if len(self.seconds) != len(self.num_patches) or any(len(row) != len(self.batch) for row in self.seconds):
            raise ValueError(f"seconds is not {len(self.num_patches)} rows of {len(self.batch)} values")

    def image_s(self, num_patches: FloatArray, batch: FloatArray) -> FloatArray:
        """Return seconds per image, ``[N]``, for images of ``num_patches`` in batches of ``batch``, both ``[N]``.

        Bilinear; constant in the batch size beyond its ends, and in the patches as ``LengthTable``.
        """
        batches = np.clip(batch, self.batch[0], self.batch[-1])
        per_image = np.array(self.seconds) / np.array(self.batch)
        at_batch = np.stack([np.interp(batches, self.batch, row) for row in per_image])
        above = np.searchsorted(self.num_patches, num_patches).clip(1, max(len(self.num_patches) - 1, 1))
        sizes = np.array(self.num_patches, dtype=np.float64)
        if len(sizes) == 1:
            inside = at_batch[0]
        else:
            low, high = sizes[above - 1], sizes[above]
            weight = ((num_patches - low) / (high - low)).clip(0.0, 1.0)
            every = np.arange(len(num_patches))
            inside = (1.0 - weight) * at_batch[above - 1, every] + weight * at_batch[above, every]
        return inside * np.maximum(num_patches / sizes[-1], 1.0)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one device reaches, measured unless its data sheet states it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    flops: _Positive
    """Peak in FLOP/s in the compute type."""
    memory_nbytes: _Size
    """Of the device memory."""
    bandwidth: _Positive
    """Of the device memory, in bytes/s."""
    link: _Positive | None
    """Bytes/s that it sends to its node's other devices in an all-reduce; None if one device alone was measured."""
    devices_per_node: _Size


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a backbone step in addition to its microbatches' layers, heads and connectors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step_s: _Amount
    """Per step, independent of its size."""
    microbatch_s: _Amount
    """Per microbatch, independent of its size."""
    parameter_s: _Amount
    """Per step and parameter that the device clips and updates."""
    messages_s: _Amount = 0.0
    """Per microbatch, on each rank of a replica of several: what the leader tells them, and whether all could read."""
    ends_s: _Amount = 0.0
    """Per step of a replica that shares nothing: its first forward and its last backward, beyond others."""
    ends_parameter_s: _Amount = 0.0
    """Likewise, per trained parameter of the device."""
    ends_forward_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of the forward in both."""
    first_backward_parameter_s: _Amount = 0.0
    """Per step and trained parameter, what its first backward takes less: it adds its gradients to none."""
    launch_s: _Amount = 0.0
    """Per transfer between pipeline ranks, at each end, whatever its size: to start it and to wait for it."""
    pass_s: _Amount = 0.0
    """Per microbatch and pipeline stage, forward and backward, whatever they compute; ``heads`` have one stage's."""
    pass_forward_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of the forward in it."""


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """Seconds of an encoder in addition to its forward."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    decode_s: _Amount
    """Per image: reading, decoding and preprocessing in one thread, mean over the data."""
    batch_s: _Amount
    """Per batch: leasing it, reporting it and putting it into the pool."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times, their device and libraries; the profile file has these keys except ``source``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    device: str
    """As torch names it."""
    model: dict[str, Any]
    """The settings of model and arithmetic that times depend on, as nested plain values (``model_facts``)."""
    versions: dict[str, str]
    """Versions of the libraries that computed, by library."""
    facts: DeviceFacts | None = None
    """Of one such device; None if only a run's microbatches were measured."""
    layers: dict[_Size, LengthTable] = field(default_factory=dict)
    """Of one decoder layer, forward and backward with recomputation; by tensor parallel degree."""
    heads: dict[_Size, LengthTable] = field(default_factory=dict)
    """Of final norm, head and loss, forward and backward; by tensor parallel degree."""
    connectors: dict[_Size, LengthTable] = field(default_factory=dict)
    """Over the vision tokens of a microbatch of that many tokens; by tensor parallel degree."""
    connector_rows: dict[_Size, tuple[_Amount, ...]] = field(default_factory=dict)
    """These vision tokens, by tensor parallel degree; empty: as many as the data has on average."""
    embeddings: dict[_Size, LengthTable] = field(default_factory=dict)
    """Of the embedding's gradient; by tensor parallel degree. Empty: it is in ``heads``."""
    attention: dict[_Size, AttentionCosts] = field(default_factory=dict)
    """The part of ``layers`` that depends on how long sub-sequences are; by tensor parallel degree."""
    losses: dict[_Size, LossCosts] = field(default_factory=dict)
    """The part of ``heads`` that depends on how many tokens have loss; by tensor parallel degree."""
    strategies: Strategies = field(default_factory=dict)
    """A decoder layer in each memory strategy."""
    forward_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of the forward in the time of a decoder layer; None if it was not measured."""
    head_forward_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the forward in the time of final norm, head and loss; None if it was not measured."""
    encoders: dict[str, dict[_Size, ImageTable]] = field(default_factory=dict)
    """Forwards, by encoder and tensor parallel degree."""
    encoder_strategies: dict[str, Strategies] = field(default_factory=dict)
    """A layer of each encoder, trained, in each memory strategy."""
    images: dict[str, ImageCosts] = field(default_factory=dict)
    """By encoder."""
    steps: StepCosts = StepCosts(0.0, 0.0, 0.0)
    interference: dict[str, Interference] = field(default_factory=dict)
    """Of each encoder with the backbone; empty if it was not measured."""
    replicas: dict[Sharded, ReplicaCosts] = field(default_factory=dict)
    """Of two replicas, by sharding; empty on accelerators, and if one device alone was measured."""
    host: HostCosts | None = None
    """None on accelerators, whose hosts have cores of their own for it."""
    trials: tuple[Trial, ...] = ()
    """Plans that ran for a few steps; empty if none did."""
    trial_conditions: dict[str, Any] = field(default_factory=dict)
    """What else their rates depend on."""
    microbatches: MicrobatchCosts | None = None
    """The cost that a run has fitted to its microbatches, for packing; None if none has."""
    calibration: Calibration | None = None
    """Factors of all predicted times by a finished run; None if there is none."""
    schema: int = PROFILE_SCHEMA
    source: str = field(default="profile", compare=False)
    """Path of the file that it was read from, for messages."""

    def check(self, device: str, model: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Raise ConfigError if device, model or library versions differ from this run's; it names every difference."""
        then = dict(leaves({"device": self.device, "model": self.model, "versions": self.versions}))
        now = dict(leaves({"device": device, "model": model, "versions": versions}))
        differs = [
            f"{key} is {then.get(key)!r} there and {now.get(key)!r} in this run"
            for key in dict.fromkeys([*then, *now])
            if then.get(key) != now.get(key) and key not in _NO_MATTER
        ]
        if differs:
            raise ConfigError(f"{self.source}: {'; '.join(differs)}; {MEASURE_AGAIN}")

    def check_modules(self, device: str, modules: Mapping[str, Any]) -> None:
        """As ``check``, of the device and the modules' shapes (``module_facts``) alone: other settings may differ."""
        same = replace(self, model={key: self.model.get(key) for key in modules})
        same.check(device, modules, self.versions)

    @property
    def is_measured(self) -> bool:
        """Whether it has tables of times; otherwise times are by data sheets, with its calibration if it has one."""
        return bool(self.layers)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest microbatch for which it gives times."""
        if not self.is_measured:
            return _ANY_TOKENS
        tables = [table for each in (self.layers, self.heads, self.connectors) for table in each.values()]
        return int(MAX_EXTRAPOLATION * min(table.num_tokens[-1] for table in tables))

    @property
    def device_type(self) -> str:
        """The device's name in plans: its short key, or torch's name."""
        spec = device_spec(self.device)
        return spec.key if spec is not None else self.device

    @property
    def known_facts(self) -> DeviceFacts:
        """The device's facts; ConfigError if there are none."""
        if self.facts is None:
            raise ConfigError(
                f"{self.source} has no times of {self.device}: a run wrote it, for scheduler.cost_profile alone; take "
                "a profile of flowtrain profile, or of flowtrain calibrate RUN, which fits times to a finished run"
            )
        return self.facts

    def devices(self, count: int, devices_per_node: int) -> DeviceType:
        """Return ``count`` of the measured devices, for planning; links between nodes are not measured."""
        facts, spec = self.known_facts, device_spec(self.device)
        # Links of a device without data sheet are unknown. It is mostly a CPU, whose cores share its memory.
        links = Links(facts.bandwidth, facts.bandwidth, "as fast as memory, not measured", facts.bandwidth)
        if spec is not None:
            links = data_sheet_device_type(spec.key, count).links
        if facts.link is not None:
            network = min(links.network, facts.link)
            links = replace(links, node=facts.link, network=network, source="inside a node as measured")
        return DeviceType(
            self.device_type, count, facts.flops, facts.memory_nbytes, facts.bandwidth, links, devices_per_node
        )

    def to_json(self) -> str:
        """Return the file's text."""
        values = asdict(self)
        del values["source"]
        return json.dumps(values, indent=1)


def read_profile(path: str | PathLike[str]) -> Profile:
    """Read a profile; raises ConfigError if it is unreadable, incomplete or of another schema."""
    try:
        values = _json_object(Path(path))
        if (schema := values["schema"]) != PROFILE_SCHEMA:
            raise ConfigError(f"{path}: schema is {schema!r}, this version reads {PROFILE_SCHEMA}; {MEASURE_AGAIN}")
        return TypeAdapter(Profile).validate_python({**values, "source": str(path)})
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        if all(fault["type"] in _OTHER_FIELDS for fault in error.errors()):
            more = [f"{len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
            faults = [*faults[:_SHOWN], *more, "another version may have written it"]
        of_factors = all(fault["loc"][:1] == ("calibration",) for fault in error.errors())
        raise ConfigError(
            f"{path}: {'; '.join(faults)}; {_CALIBRATE_AGAIN if of_factors else MEASURE_AGAIN}"
        ) from error
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(
            f"{path}: the profile cannot be read: {reason}; give its path, write one with flowtrain profile CONFIG "
            f"--save FILE, {OR_NO_PROFILE}"
        ) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: the profile cannot be read ({error}); {MEASURE_AGAIN}") from error


def _json_object(path: Path) -> dict[str, Any]:
    """Return the values of a file with a schema; ConfigError if it is another kind of file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict) or "schema" not in values:
        target = path.with_suffix(".json")
        raise ConfigError(f"{path} is not a profile file: flowtrain profile CONFIG --save {target} writes one")
    return values


def configured_profile(config: RunConfig) -> Profile | None:
    """Return the profile of ``allocator.profile``, or else of the emulated devices; None if there is none."""
    key, path = "allocator.profile", config.allocator.profile
    if path is None and config.emulation is not None:
        key, path = "emulated.profile", config.emulation.profile
    if path is None:
        return None
    try:
        return read_profile(path)
    except ConfigError as error:
        raise ConfigError.of(key, FaultCode.VALUE, f"{key}: {error}") from error


def planned_profile(config: RunConfig, device: str) -> Profile | None:
    """Return ``configured_profile`` if it is of this device, else None."""
    profile = configured_profile(config)
    return profile if profile is not None and profile.device == device else None


_NO_MATTER = frozenset({"model.sharding"})
"""In files of earlier versions; a device that is measured alone has no shards."""


def module_facts(config: RunConfig, model: ModelSpec) -> dict[str, Any]:
    """Return what decides the times of a model's modules beside the settings that times follow."""
    return {**model.shapes(), "dtype": config.model.dtype}


def model_facts(config: RunConfig, model: ModelSpec) -> dict[str, Any]:
    """Return the shapes and settings that a module's time depends on, without degrees and data."""
    backbone = config.backbone
    return {
        **module_facts(config, model),
        "freeze": [key for key in config.model.freeze if not is_pattern(key)],  # the twin ignores patterns
        "optimizer": config.training.optimizer,
        "attention": backbone.attention,
        "sequence_parallel": backbone.sequence_parallel,
        "activation_checkpointing": backbone.activation_checkpointing,
        "checkpoint_every": backbone.checkpoint_every,
        "compile": backbone.compile,
        "threads": {"backbone": backbone.num_threads}
        | {name: encoder.num_threads for name, encoder in config.encoders.items()},
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute, without build suffixes (``+cu130``)."""
    return {name: version(name).partition("+")[0] for name in _LIBRARIES}
