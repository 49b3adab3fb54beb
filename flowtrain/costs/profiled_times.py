"""Module times interpolated in a measured profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flowtrain.costs.collectives import BACKWARD_SHARE
from flowtrain.costs.communication import TensorCommunication, encoder_passes, recomputed_share
from flowtrain.costs.flops import FloatArray, IntArray, backbone_passes
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchSeconds, ragged_squares
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import mean_with_images
from flowtrain.costs.profile import MAX_EXTRAPOLATION, MEASURE_AGAIN, OR_NO_PROFILE, LengthTable, Profile
from flowtrain.costs.profile_layers import measured_amounts, strategies_s
from flowtrain.costs.rank_memory import trains_embedding
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError

CPU = "cpu"
"""Torch's name of every CPU."""
_MOST_FORWARD = 0.9
"""Of a pass's time, whatever a memory strategy that was not measured should save."""
_LEAST_SHARE = 0.25
"""Of the time of a layer or the head, which is left however short the sub-sequences are, and with hardly any loss."""


class ProfileTimes:
    """``ModuleTimes`` from a profile.

    A tensor parallel degree that was not measured is derived from the largest measured one that divides it: the
    computation is scaled down, the communication is computed from the links' bandwidth.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        communication: TensorCommunication,
        max_batch_patches: Mapping[str, int],
        decode_threads: Mapping[str, int],
    ) -> None:
        """max_batch_patches, decode_threads: as configured, by encoder.

        Raises ConfigError if sizes of the workload are far above the measured ones, or if a table is missing.
        """
        self._profile, self._workload, self._max_batch_patches = profile, workload, max_batch_patches
        self._decode_threads = decode_threads
        self._communication = communication
        measured = _measured_setup(communication.setup, profile.model)
        self._again = _strategies_share(profile, communication.setup, measured)
        self._passes = self._again * _trained_share(communication.model, workload)
        lengths = workload.lengths.astype(np.float64)
        squares = np.square(lengths).sum(), ragged_squares(lengths).sum()
        self._squares_per_token, self._ragged_per_token = np.array(squares) / lengths.sum()
        for name, tables in (("layers", profile.layers), ("heads", profile.heads), ("connectors", profile.connectors)):
            if 1 not in tables:
                raise ConfigError(f"{profile.source}: {name} has no table for degree 1; {MEASURE_AGAIN}")
            for tp, table in tables.items():
                _check_reach(
                    f"{profile.source}: {name}.{tp}",
                    "scheduler.microbatch_tokens",
                    workload.microbatch_tokens,
                    table.num_tokens[-1],
                    f"run flowtrain profile again with scheduler.microbatch_tokens={workload.microbatch_tokens}, "
                    f"{OR_NO_PROFILE}",
                )
        for name in workload.images:
            if 1 not in profile.encoders.get(name, {}) or name not in profile.images:
                raise ConfigError(f"{profile.source}: encoders.{name} has no table for degree 1; {MEASURE_AGAIN}")
            largest = max(table.num_patches[-1] for table in profile.encoders[name].values())
            most = int(self._patches(name).max())
            _check_reach(f"{profile.source}: encoders.{name}", "patches of an image", most, largest, MEASURE_AGAIN)

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        squares, ragged = self._squares_per_token * num_tokens, self._ragged_per_token * num_tokens
        return self._layers_s(num_tokens, squares, ragged, tp)

    def _layers_s(self, num_tokens: FloatArray, squares: FloatArray, ragged: FloatArray, tp: int) -> FloatArray:
        """Seconds of a layer; squares, ragged: as of ``MicrobatchColumns``, where attention is apart."""
        layers, attention = self._profile.layers, self._profile.attention
        seconds = _scaled(layers, num_tokens, tp, self._communication.layer_s)
        measured = _nearest(layers, tp)
        if measured in attention:
            beyond = attention[measured].beyond_s(layers[measured].num_tokens, num_tokens, squares, ragged)
            seconds = np.maximum(seconds + beyond * (measured / tp), _LEAST_SHARE * seconds)
        return self._passes * seconds

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._heads_s(num_tokens, self._workload.target_share * num_tokens, tp)[0]

    def _heads_s(self, num_tokens: FloatArray, num_target_tokens: FloatArray, tp: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of the head without its stage's ``pass_s``, and those of its forward."""

        def unsplit(tokens: FloatArray, degree: int) -> FloatArray:
            return self._communication.head_s(tokens, num_target_tokens, degree) + self.pass_s

        heads, losses, share = self._profile.heads, self._profile.losses, self._profile.head_forward_share
        share = 1.0 - BACKWARD_SHARE if share is None else share
        whole = _scaled(heads, num_tokens, tp, unsplit)
        seconds, forward = whole - self.pass_s, share * whole - self.pass_forward_share * self.pass_s
        measured = _nearest(heads, tp)
        if measured in losses:
            costs = losses[measured]
            beyond = (measured / tp) * costs.beyond_s(heads[measured].num_tokens, num_tokens, num_target_tokens)
            seconds = seconds + beyond
            forward = forward + (share if costs.forward_share is None else costs.forward_share) * beyond
        seconds = np.maximum(seconds, (_LEAST_SHARE * whole - self.pass_s).clip(0.0))
        return seconds, forward.clip(0.0, seconds)

    def microbatches_s(self, works: MicrobatchColumns, tp: int) -> MicrobatchSeconds:
        """As ``ModuleTimes``; without attention and losses apart, microbatches of as many tokens take as long."""
        tokens = works.num_tokens
        return MicrobatchSeconds(
            self._layers_s(tokens, works.squares, works.ragged, tp),
            *self._heads_s(tokens, works.target_tokens, tp),
            self._connectors_s(tokens, works.vision_tokens, tp),
            self._embeddings_s(tokens, tp),
        )

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        connecting = self._connectors_s(num_tokens, self._workload.vision_share * num_tokens, tp)
        return connecting + self._embeddings_s(num_tokens, tp)

    def _connectors_s(self, num_tokens: FloatArray, num_rows: FloatArray, tp: int) -> FloatArray:
        tables = self._profile.connectors
        seconds, measured = _scaled(tables, num_tokens, tp, _nothing), _nearest(tables, tp)
        rows = self._profile.connector_rows.get(measured, ())
        if not any(rows):
            return seconds
        of_measured = measured_amounts(tables[measured].num_tokens, num_tokens, rows)
        return seconds * np.divide(num_rows, of_measured, out=np.zeros_like(seconds), where=of_measured > 0.0)

    def _embeddings_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        tables = self._profile.embeddings
        if not tables or not trains_embedding(self._communication.model.backbone):
            return np.zeros_like(num_tokens)
        return _scaled(tables, num_tokens, tp, _nothing)

    def images_s(self, encoder: str, tp: int, *, together: FloatArray | float | None = None) -> FloatArray:
        """As ``ModuleTimes``; an actor's batches are as large as ``max_batch_patches`` allows."""
        decoding, forward = self._stages_s(encoder, tp, together)
        return np.maximum(decoding, forward)

    def encode_stages_s(self, encoder: str, tp: int) -> tuple[FloatArray, FloatArray]:
        """As ``ModuleTimes``."""
        return self._stages_s(encoder, tp, None)

    def _stages_s(self, encoder: str, tp: int, together: FloatArray | float | None) -> tuple[FloatArray, FloatArray]:
        """Seconds of decode threads and of the device for each sample's images; both ``[S]``."""
        tables, costs = self._profile.encoders[encoder], self._profile.images[encoder]
        measured, patches = _nearest(tables, tp), self._patches(encoder)
        every = self._workload.images[encoder][0]
        at = every > 0
        num_images = every[at]
        if together is None:
            batch = np.maximum(self._max_batch_patches[encoder] // patches, 1.0)
        else:
            batch = np.broadcast_to(together, every.shape)[at]
        of_measured, of_tp = (self._communication.images_s(encoder, degree)[at] for degree in (measured, tp))
        computing = num_images * tables[measured].image_s(patches, batch) - of_measured
        passes, reductions = encoder_passes(
            self._communication.setup, self._workload.freeze
        )  # a profile has the forward
        device = passes * np.maximum(computing, 0.0) * measured / tp + reductions * of_tp
        if together is None:
            device = device + num_images / batch * costs.batch_s
        decoding = num_images * costs.decode_s
        beside, forward = np.zeros(len(every)), np.zeros(len(every))
        # If the device is a CPU, it decodes too; with an accelerator, the host decodes at the same time.
        if self._profile.device == CPU:
            forward[at] = device + decoding
        else:
            beside[at], forward[at] = decoding / self._decode_threads[encoder], device
        return beside, forward

    def sample_s(self, encoder: str, tp: int) -> float:
        """As ``ModuleTimes``."""
        return mean_with_images(self.images_s(encoder, tp), self._workload.images[encoder][0])

    def microbatch_s(self, replica_size: IntArray) -> FloatArray:
        """As ``ModuleTimes``."""
        steps = self._profile.steps
        return steps.microbatch_s + np.where(replica_size > 1, steps.messages_s, 0.0)

    @property
    def launch_s(self) -> float:
        """As ``ModuleTimes``."""
        return self._profile.steps.launch_s

    @property
    def forward_share(self) -> float:
        """As ``ModuleTimes``; recomputation that was not measured lengthens the backward alone."""
        measured = self._profile.forward_share
        return 1.0 - BACKWARD_SHARE if measured is None else min(measured / self._again, _MOST_FORWARD)

    @property
    def pass_s(self) -> float:
        """As ``ModuleTimes``."""
        return self._profile.steps.pass_s

    @property
    def pass_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return self._profile.steps.pass_forward_share

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._profile.steps.step_s + num_parameters * self._profile.steps.parameter_s

    def ends_s(self, trained: FloatArray) -> FloatArray | None:
        """As ``ModuleTimes``."""
        return self._profile.steps.ends_s + self._profile.steps.ends_parameter_s * trained

    @property
    def ends_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return self._profile.steps.ends_forward_share

    def first_backward_s(self, trained: FloatArray) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._profile.steps.first_backward_parameter_s * trained

    def slowdown(self, encoder: str) -> float | None:
        """As ``ModuleTimes``."""
        measured = self._profile.interference.get(encoder)
        return None if measured is None else measured.factor

    @property
    def collectives(self) -> float:
        """As ``ModuleTimes``."""
        return 1.0

    def replicas_s(
        self, sharding: str, parameters: FloatArray, shards: FloatArray
    ) -> tuple[FloatArray, FloatArray] | None:
        """As ``ModuleTimes``."""
        costs = self._profile.replicas.get("gradients" if sharding == "gradients" else "full")
        if costs is None:
            return None
        return costs.gathering_s(parameters, shards), costs.reducing_s(parameters, shards)

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        """As ``ModuleTimes``."""
        host, num_samples = self._profile.host, self._workload.global_batch_size
        if host is None:
            return np.zeros_like(num_microbatches)
        num_batches = sum(map(self._batches, self._workload.images)) if has_encoders else 0.0
        return host.seconds(num_samples, num_batches, num_microbatches, replicas)

    def _batches(self, encoder: str) -> float:
        """Mean batches of images in a step; a sample's images stay together."""
        num_batches, room, most = 0, 0, self._max_batch_patches[encoder]
        num_patches, size = self._workload.images[encoder][1], self._workload.global_batch_size
        num_steps = max(1, len(num_patches) // size)
        for index in range(num_steps * size):
            patches = int(num_patches[index % len(num_patches)])
            room = 0 if index % size == 0 else room  # a batch has samples of one step
            if 0 < patches <= room:
                room -= patches
            elif patches:
                num_batches, room = num_batches + 1, most - patches
        return num_batches / num_steps

    def _patches(self, encoder: str) -> FloatArray:
        """Mean patches per image, for each sample that has images."""
        num_images, num_patches = self._workload.images[encoder]
        at = num_images > 0
        return num_patches[at] / num_images[at]


def _strategies_share(profile: Profile, setup: TrainingSetup, measured: TrainingSetup) -> float:
    """Time of a layer under a setup's memory strategies over that under the measured one's, as far as it knows them."""
    asked, known = (strategies_s(profile.strategies, each) for each in (setup, measured))
    return asked / known if asked and known else _passes(setup) / _passes(measured)


def _passes(setup: TrainingSetup) -> float:
    """Forwards that a layer's forward, backward and recomputation take; a backward takes two."""
    return 3.0 + recomputed_share(setup)


def _trained_share(model: ModelSpec, workload: Workload) -> float:
    """Time of a layer over that of a measured one: a profile's layers are all trained, or frozen as a module."""
    whole = replace(model.backbone, trained=None)
    some, every = (backbone_passes(each, workload.freeze).matrices for each in (model.backbone, whole))
    return some / every


def _measured_setup(setup: TrainingSetup, model: Mapping[str, Any]) -> TrainingSetup:
    """The setup with the recomputation that was measured, if the profile tells: a plan may choose another."""
    words = model.get("activation_checkpointing", setup.activation_checkpointing)
    return replace(
        setup,
        activation_checkpointing=tuple(words) if isinstance(words, list) else words,
        checkpoint_every=model.get("checkpoint_every", setup.checkpoint_every),
    )


_Unsplit = Callable[[FloatArray, int], FloatArray]
"""Seconds that a tensor parallel degree does not divide."""


def _nothing(num_tokens: FloatArray, tp: int) -> FloatArray:
    return np.zeros_like(num_tokens)


def _scaled(tables: Mapping[int, LengthTable], num_tokens: FloatArray, tp: int, unsplit: _Unsplit) -> FloatArray:
    measured = _nearest(tables, tp)
    computing = np.maximum(tables[measured](num_tokens) - unsplit(num_tokens, measured), 0.0)
    return computing * (measured / tp) + unsplit(num_tokens, tp)


def _nearest(tables: Mapping[int, Any], tp: int) -> int:
    return max(measured for measured in tables if tp % measured == 0)


def _check_reach(label: str, key: str, asked: int, measured: int, way_out: str) -> None:
    if asked > MAX_EXTRAPOLATION * measured:
        raise ConfigError(
            f"{label} was measured up to {measured}, {key} is {asked}: too far to extrapolate (at most "
            f"{MAX_EXTRAPOLATION:g} times); {way_out}"
        )
