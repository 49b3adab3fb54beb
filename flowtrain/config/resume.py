"""Which keys a resumed run may change: those that leave the losses as they are, except for rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flowtrain.config.load import digest_of, plain_values
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, Fault, FaultCode

_MAY_CHANGE = (
    "name",
    "runs_dir",
    "mode",
    "observability.*",
    "checkpoint.*",
    "limits.*",
    "pool.*",
    "allocator.*",
    "data.max_rejected_fraction",
    "data.num_feeders",  # every sample is read and sized the same, whoever does it
    "data.read_ahead_blocks",
    "data.eval.num_generated",  # answers change no loss
    "data.eval.*.num_generated",
    "data.eval.max_new_tokens",
    "data.eval.*.max_new_tokens",
    "scheduler.lookahead_steps",
    "scheduler.cost_profile",  # the coefficients themselves come from the checkpoint
    "encoders.*.data_parallel_size",
    "encoders.*.tensor_parallel_size",  # features agree closely
    "encoders.*.segment_nbytes",
    "encoders.*.num_cpus",
    "encoders.*.num_devices",
    "encoders.*.accelerator_type",
    "encoders.*.decode_threads",
    "backbone.data_parallel_size",  # the checkpoint is resharded; losses agree closely, see controller/resume.py
    "backbone.tensor_parallel_size",
    "backbone.pipeline_parallel_size",
    "pipeline.*",
    "backbone.num_cpus",
    "backbone.num_devices",
    "backbone.accelerator_type",
    "backbone.prefetch_microbatches",
    "backbone.activation_checkpointing",  # recomputation repeats the same operations
    "backbone.activation_checkpointing.*",
    "encoders.*.activation_checkpointing",
    "encoders.*.activation_checkpointing.*",
    "backbone.usable_memory_nbytes",
    "backbone.sharding",  # these four change the order of sums
    "backbone.hybrid_shard_size",
    "backbone.gradient_reduction",
    "backbone.sequence_parallel",
    "training.on_nonfinite",
    "training.on_spike",
    "training.max_skipped_steps",
)
_MAY_GROW = ("training.max_steps", "training.num_epochs")
ABSENT = "(not given)"
_WITHOUT_IMAGES = "llm_only"
TRAINED_BEFORE = (
    "the checkpoint has its trained weights, which only mode 'monolithic' with trainable true goes on with (flowtrain "
    "export takes them out)"
)
_TRAINED_LATER = (
    "the checkpoint has no optimizer state of it; export the run, and train a new one from the export (model.path)"
)


def check_resumable(old: RunConfig, new: RunConfig) -> None:
    """Raise ConfigError, with each key and both values, unless ``new`` can continue a run begun with ``old``.

    Pool, limits, checkpoints, observability, parallel sizes and the run's length may change. Keys that decide the order
    of the data, the model or a bit of the arithmetic may not.
    """
    faults = [fault for change in changes(old, new) if (fault := _fault(change.key, change.old, change.new))]
    if faults:
        raise ConfigError(
            "\n".join(
                [
                    f"run {new.name!r} cannot be resumed with this configuration; "
                    "set these keys back, or start a run under another name:",
                    *(f"  - {fault.text}" for fault in faults),
                ]
            ),
            faults,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A key to which a resume gives another value; ``ABSENT`` stands for a missing key."""

    key: str
    old: Any
    new: Any


def changes(old: RunConfig, new: RunConfig) -> tuple[Change, ...]:
    """Return every key in which two configurations differ, in the order of the file, whether it may change or not."""
    before, after = _flat(old), _flat(new)
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in dict.fromkeys([*before, *after]))
    return tuple(Change(key, then, now) for key, then, now in pairs if then != now)


def config_digest(config: RunConfig) -> str:
    """Hash of the keys that a resume must keep: equal for configurations that may continue each other."""
    return digest_of({key: value for key, value in _flat(config).items() if not _free(key) and key not in _MAY_GROW})


def _fault(key: str, old: Any, new: Any) -> Fault | None:
    text = f"{key} was {old!r}, is now {new!r}"
    if key == "mode" and _WITHOUT_IMAGES in (old, new):
        return Fault(key, FaultCode.RESUME, f"{text}; {_WITHOUT_IMAGES!r} trains without images, so losses would jump")
    if _free(key):
        return None
    if fnmatchcase(key, "encoders.*.trainable"):
        return Fault(key, FaultCode.RESUME, f"{text}; {_TRAINED_LATER if new else TRAINED_BEFORE}")
    if key in _MAY_GROW and old is not None and new is not None:
        return None if new > old else Fault(key, FaultCode.RESUME, f"{text}; it may only grow")
    return Fault(key, FaultCode.RESUME, text)


def _free(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in _MAY_CHANGE)


def _flat(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(plain_values(config)))


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of plain values, lists counted from 0, each with its value."""
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield prefix, value
        return
    for key, item in items:
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
