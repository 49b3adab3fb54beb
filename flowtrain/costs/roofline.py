"""Computed module times: the longer of FLOPs over an achievable share of the peak and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.communication import TensorCommunication, encoder_passes, recomputed_share
from flowtrain.costs.flops import FloatArray, microbatch_flops
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchSeconds
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import mean_with_images
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload

_OPTIMIZER_PASSES = {"adamw": 7, "sgd": 3}
"""Float32 numbers moved per parameter: weight, gradient and states read, weight and states written."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a data sheet's figures that are reached: assumptions, used without a measured profile."""

    backbone: float = 0.65
    """Of the peak FLOP/s inside a decoder layer, between communications."""
    encoder: float = 0.5
    """Of the peak FLOP/s inside an encoder's layer."""
    memory: float = 0.8
    """Of the memory bandwidth."""
    links: float = 0.8
    """Of the links' bandwidth in collectives."""


class Roofline:
    """``ModuleTimes`` from data sheets, model shapes and the data's mix."""

    def __init__(
        self,
        device_type: DeviceType,
        model: ModelSpec,
        workload: Workload,
        setup: TrainingSetup,
        efficiency: Efficiency | None = None,
    ) -> None:
        self._device, self._model, self._workload, self._setup = device_type, model, workload, setup
        self._efficiency = efficiency if efficiency is not None else Efficiency()
        self._communication = TensorCommunication(device_type, model, workload, setup, self._efficiency.links)
        self._images_s: dict[tuple[str, int, bool], FloatArray] = {}
        tokens, flops = workload.tokens_per_sample, workload.flops(model)
        head = workload.head_flops(model)
        layers = float(flops.backbone.mean()) - head
        self._layer_flops = layers / tokens / model.backbone.num_layers * (1.0 + recomputed_share(setup) / 3.0)
        self._head_flops = head / tokens
        self._connector_flops = float(flops.connector.mean()) / tokens

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._layers_s(self._layer_flops * num_tokens, num_tokens, tp)

    def _layers_s(self, flops: FloatArray, num_tokens: FloatArray, tp: int) -> FloatArray:
        backbone = self._model.backbone
        passes = 3.0 + recomputed_share(self._setup)
        weights = passes * self._setup.dtype_nbytes * backbone.layer_matmul_parameters
        computing = self._computing(flops, weights, tp)
        return computing + self._communication.layer_s(num_tokens, tp)

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        communication = self._communication.head_s(num_tokens, self._workload.target_share * num_tokens, tp)
        return self._heads_s(self._head_flops * num_tokens, tp) + communication

    def _heads_s(self, flops: FloatArray, tp: int) -> FloatArray:
        return self._computing(flops, 3.0 * self._setup.dtype_nbytes * self._model.backbone.head_parameters, tp)

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._connectors_s(self._connector_flops * num_tokens, tp)

    def _connectors_s(self, flops: FloatArray, tp: int) -> FloatArray:
        return self._computing(flops, 3.0 * self._setup.dtype_nbytes * self._model.connector.num_parameters, tp)

    def microbatches_s(self, works: MicrobatchColumns, tp: int) -> MicrobatchSeconds:
        """As ``ModuleTimes``."""
        layer, head, connector = microbatch_flops(
            self._model,
            num_tokens=works.num_tokens,
            squares=works.squares,
            vision_tokens=works.vision_tokens,
            target_tokens=works.target_tokens,
            freeze=self._workload.freeze,
        )
        layer = layer * (1.0 + recomputed_share(self._setup) / 3.0)
        communication = self._communication.head_s(works.num_tokens, works.target_tokens, tp)
        return MicrobatchSeconds(
            self._layers_s(layer, works.num_tokens, tp),
            self._heads_s(head, tp) + communication,
            self._connectors_s(connector, tp),
        )

    def images_s(self, encoder: str, tp: int, *, in_ranks: bool = False) -> FloatArray:
        """As ``ModuleTimes``; sending the features out of the node overlaps with the computation."""
        key = encoder, tp, in_ranks
        if key not in self._images_s:
            self._images_s[key] = self._computed_images_s(encoder, tp, in_ranks)
        return self._images_s[key]

    def _computed_images_s(self, encoder: str, tp: int, in_ranks: bool) -> FloatArray:
        _, num_patches = self._workload.images[encoder]
        passes, reductions = encoder_passes(self._setup, self._workload.freeze)
        # FLOPs of a trained encoder have its backward, but nothing that is recomputed.
        flops = self._workload.images_flops(self._model, encoder) * max(passes / 3.0, 1.0)
        computing = flops / (tp * self._device.flops * self._efficiency.encoder)
        computing = computing + reductions * self._communication.images_s(encoder, tp)
        if in_ranks:
            return computing
        num_rows = num_patches / self._model.encoders[encoder].patches_per_row
        rows = num_rows * (self._model.connector.feature_dim * self._setup.dtype_nbytes)
        return np.maximum(computing, rows / (tp * self._device.links.network * self._efficiency.links))

    def encode_stages_s(self, encoder: str, tp: int) -> tuple[FloatArray, FloatArray]:
        """As ``ModuleTimes``; no data sheet tells how long decoding takes."""
        forward = self.images_s(encoder, tp)
        return np.zeros_like(forward), forward

    def sample_s(self, encoder: str, tp: int) -> float:
        """As ``ModuleTimes``."""
        return mean_with_images(self.images_s(encoder, tp), self._workload.images[encoder][0])

    def microbatch_s(self) -> float:
        """As ``ModuleTimes``; kernel launches are assumed to cost nothing."""
        return 0.0

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """As ``ModuleTimes``; the optimizer's memory traffic."""
        moved = FLOAT32_NBYTES * _OPTIMIZER_PASSES[self._setup.optimizer] * num_parameters
        return moved / (self._device.bandwidth * self._efficiency.memory)

    def slowdown(self, encoder: str) -> float | None:
        """As ``ModuleTimes``."""
        return None

    def replicas_s(
        self, sharding: str, parameters: FloatArray, shards: FloatArray
    ) -> tuple[FloatArray, FloatArray] | None:
        """As ``ModuleTimes``."""
        return None

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        """As ``ModuleTimes``; data sheets are of accelerators."""
        return np.zeros_like(num_microbatches)

    def _computing(self, flops: FloatArray, weights_nbytes: float, tp: int) -> FloatArray:
        arithmetic = flops / (tp * self._device.flops * self._efficiency.backbone)
        return np.maximum(arithmetic, weights_nbytes / (tp * self._device.bandwidth * self._efficiency.memory))
