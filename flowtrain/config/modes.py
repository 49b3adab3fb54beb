"""What a mode asks of devices and encoders."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from flowtrain.errors import Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig

COLOCATED_SHARE = 0.4
"""Share of a device that an encoder takes in mode ``colocated`` unless ``num_devices`` is below 1."""


def colocated_shares(config: RunConfig) -> tuple[dict[str, float], float]:
    """Return the share of each device that an encoder takes in mode ``colocated``, by name, and the backbone's."""
    encoders = {
        name: encoder.num_devices if encoder.num_devices < 1 else COLOCATED_SHARE
        for name, encoder in config.encoders.items()
    }
    return encoders, round(1.0 - sum(encoders.values()), 4)  # Ray counts ten-thousandths


def ranks_have_whole_devices(config: RunConfig) -> Iterator[Fault]:
    """Refuse several ranks on one accelerator; mode ``colocated`` is other than that, and a plan sets its shares."""
    if config.model.device == "cpu" or config.mode in ("colocated", "auto"):
        return
    found: dict[str, tuple[float, int]] = {"backbone": (config.backbone.num_devices, _num_ranks(config))}
    if config.has_encoder_actors:
        found |= {
            f"encoders.{name}": (each.num_devices, each.tensor_parallel_size) for name, each in config.encoders.items()
        }
    for key, (num_devices, num_ranks) in found.items():
        if num_ranks > 1 and num_devices < 1:
            yield Fault(
                f"{key}.num_devices",
                FaultCode.DEGREES,
                f"{key}.num_devices ({num_devices:g}) below 1 would put several of {num_ranks} ranks on one "
                "accelerator, which NCCL does not support; set it to 1, or the parallel sizes to 1",
            )


def encoders_are_trained_inside(config: RunConfig) -> Iterator[Fault]:
    """Refuse a trained encoder outside of the backbone's ranks, and a learning rate of encoders that are frozen."""
    rate = config.training.learning_rates.encoders
    if rate is not None and not config.trains_encoders:
        yield Fault(
            "training.learning_rates.encoders",
            FaultCode.CONFLICT,
            f"training.learning_rates.encoders ({rate:g}) has no effect: no encoder is trained; set "
            f"encoders.{next(iter(config.encoders))}.trainable=true in mode 'monolithic', or leave out the rate",
        )
    if config.settled_mode == "monolithic":
        return
    for name, encoder in config.encoders.items():
        if encoder.trainable:
            yield Fault(
                f"encoders.{name}.trainable",
                FaultCode.CONFLICT,
                f"encoders.{name}.trainable (true) needs mode 'monolithic' (now {config.mode!r}): only there gradients "
                "reach the encoder; set the mode, or trainable to false",
            )


def encoder_memory_is_of_trained_layers(config: RunConfig) -> Iterator[Fault]:
    """Refuse a memory strategy of an encoder that keeps nothing, since it is frozen."""
    for name, encoder in config.encoders.items():
        if encoder.activation_checkpointing is not None and not encoder.trainable:
            yield Fault(
                f"encoders.{name}.activation_checkpointing",
                FaultCode.CONFLICT,
                f"encoders.{name}.activation_checkpointing ({encoder.activation_checkpointing}) has no effect: "
                f"encoders.{name}.trainable is false, and a frozen encoder keeps nothing for a backward; leave out "
                "the first, or set the second in mode 'monolithic'",
            )


def auto_is_free(config: RunConfig) -> Iterator[Fault]:
    """Refuse, with ``mode: auto``, settings that fit one mode or one pipeline degree alone."""
    if config.mode != "auto":
        return
    if config.allocator.method != "milp":
        yield Fault(
            "allocator.method",
            FaultCode.CONFLICT,
            f"allocator.method ({config.allocator.method!r}) is an ablation of mode 'decoupled', and mode ('auto') "
            "compares modes at their best; set the first to 'milp' or the second to 'decoupled'",
        )
    if config.pipeline.counts is not None:
        yield Fault(
            "pipeline.partition",
            FaultCode.CONFLICT,
            f"pipeline.partition ({list(config.pipeline.counts)}) is for one number of stages, and mode ('auto') "
            "chooses the stages; leave it out or unset it with =null, or set the mode",
        )


def colocated_encoders_fit_their_ranks(config: RunConfig) -> Iterator[Fault]:
    """Refuse, in mode ``colocated``, encoders that could not share the devices of one tensor parallel group."""
    if config.mode != "colocated":
        return
    tp_size = config.backbone.tensor_parallel_size
    for name, encoder in config.encoders.items():
        if tp_size % encoder.tensor_parallel_size:
            yield Fault(
                f"encoders.{name}.tensor_parallel_size",
                FaultCode.DEGREES,
                f"encoders.{name}.tensor_parallel_size ({encoder.tensor_parallel_size}) does not divide "
                f"backbone.tensor_parallel_size ({tp_size}): in mode 'colocated' an encoder shares the devices of one "
                "tensor parallel group; set it to 1",
            )


def colocated_devices_are_shared(config: RunConfig) -> Iterator[Fault]:
    """Refuse shares with which Ray could put two ranks on one device, or an encoder elsewhere than a rank."""
    if config.mode != "colocated" or config.model.device == "cpu":
        return
    shares, rest = colocated_shares(config)
    key, backbone = f"encoders.{next(iter(shares))}.num_devices", config.backbone
    if rest <= 0.5:
        yield Fault(
            key,
            FaultCode.DEGREES,
            f"{key} ({sum(shares.values()):g}) leaves the backbone {rest:g} of each device: mode 'colocated' needs "
            "more than 0.5, so that no two ranks share a device; lower it below 0.5",
        )
    elif backbone.num_devices not in (1.0, rest):
        yield Fault(
            "backbone.num_devices",
            FaultCode.DEGREES,
            f"backbone.num_devices ({backbone.num_devices:g}) is not {rest:g}, what {key} ({sum(shares.values()):g}) "
            "leaves of a device in mode 'colocated'; leave it at 1 and set the encoder's share alone",
        )
    for name, encoder in config.encoders.items():
        if encoder.accelerator_type not in (None, backbone.accelerator_type):
            yield Fault(
                f"encoders.{name}.accelerator_type",
                FaultCode.DEGREES,
                f"encoders.{name}.accelerator_type ({encoder.accelerator_type}) is not backbone.accelerator_type "
                f"({backbone.accelerator_type}): in mode 'colocated' both share devices; set it for the backbone alone",
            )


def _num_ranks(config: RunConfig) -> int:
    backbone = config.backbone
    return prod((backbone.data_parallel_size, backbone.tensor_parallel_size, backbone.pipeline_parallel_size))
