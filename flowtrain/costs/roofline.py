"""Computed module times: the sum over operators, each by its class's rule (``costs.operators``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flowtrain.costs import layers
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.collectives import BACKWARD_SHARE
from flowtrain.costs.communication import TensorCommunication, encoder_passes, recomputed_share
from flowtrain.costs.flops import FloatArray, IntArray, backbone_passes, connector_passes, images_tokens
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchSeconds
from flowtrain.costs.model_spec import FROZEN_ENCODERS, ModelSpec
from flowtrain.costs.module_times import mean_with_images
from flowtrain.costs.operators import Operator, OperatorRules
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload

_OPTIMIZER_PASSES = {"adamw": 7, "sgd": 3}
"""Float32 numbers moved per parameter: weight, gradient and states read, weight and states written."""
_LOSS_PASSES = 3
"""Times that logits are moved in forward and backward: written, read, and written as gradient."""


class Roofline:
    """``ModuleTimes`` from data sheets, model shapes and the data's mix."""

    def __init__(
        self,
        device_type: DeviceType,
        model: ModelSpec,
        workload: Workload,
        setup: TrainingSetup,
        rules: OperatorRules | None = None,
    ) -> None:
        self._device, self._model, self._workload, self._setup = device_type, model, workload, setup
        self._rules = rules if rules is not None else OperatorRules()
        share = self._rules.link_share("collective")
        self._communication = TensorCommunication(device_type, model, workload, setup, share)
        self._images_s: dict[tuple[str, int, bool], FloatArray] = {}
        self._passes = backbone_passes(model.backbone, workload.freeze)
        lengths = workload.lengths.astype(np.float64)
        self._squares_per_token = float(np.square(lengths).sum() / lengths.sum())

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._layers_s(num_tokens, self._squares_per_token * num_tokens, tp)

    def _layers_s(self, num_tokens: FloatArray, squares: FloatArray, tp: int) -> FloatArray:
        layer, passes = layers.decoder_layer(self._model.backbone, self._setup, tp, num_tokens, squares), self._passes
        again, moves_again = recomputed_share(self._setup), self._setup.share_of_layers("selective")
        return (
            (passes.matrices + again) * self._seconds(layer.matrices)
            + (passes.attention + again) * self._seconds(layer.attention)
            + (passes.attention + again + moves_again) * self._seconds(layer.moves)
            + self._communication.layer_s(num_tokens, tp)
        )

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._heads_s(num_tokens, self._workload.target_share * num_tokens, tp)

    def _heads_s(self, num_tokens: FloatArray, num_target_tokens: FloatArray, tp: int) -> FloatArray:
        head = layers.head(self._model.backbone, self._setup, tp, num_target_tokens)
        computing = self._passes.head * self._seconds(head.matrices) + _LOSS_PASSES * self._seconds(head.moves)
        return computing + self._communication.head_s(num_tokens, num_target_tokens, tp)

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._connectors_s(self._workload.vision_share * num_tokens, tp)

    def _connectors_s(self, num_rows: FloatArray, tp: int) -> FloatArray:
        parts = layers.connector(self._model.connector, self._setup, tp, num_rows)
        passes = connector_passes(self._model.connector, self._workload.freeze)
        return sum(
            (
                each * (self._seconds(part.matrices) + self._seconds(part.moves))
                for each, part in zip(passes, parts, strict=True)
            ),
            np.zeros_like(num_rows),
        )

    def microbatches_s(self, works: MicrobatchColumns, tp: int) -> MicrobatchSeconds:
        """As ``ModuleTimes``."""
        head = self._heads_s(works.num_tokens, works.target_tokens, tp)
        return MicrobatchSeconds(
            self._layers_s(works.num_tokens, works.squares, tp),
            head,
            self.forward_share * head,
            self._connectors_s(works.vision_tokens, tp),
            np.zeros_like(works.num_tokens),
        )

    def images_s(self, encoder: str, tp: int, *, together: FloatArray | float | None = None) -> FloatArray:
        """As ``ModuleTimes``; sending the features out of the node overlaps with the computation.

        Batches of any size are as efficient.
        """
        key = encoder, tp, together is not None
        if key not in self._images_s:
            self._images_s[key] = self._computed_images_s(*key)
        return self._images_s[key]

    def _computed_images_s(self, encoder: str, tp: int, in_ranks: bool) -> FloatArray:
        spec, (num_images, num_patches) = self._model.encoders[encoder], self._workload.images[encoder]
        passes, reductions = encoder_passes(self._setup, self._workload.freeze)
        tokens, squares = images_tokens(spec, num_images, num_patches)
        is_trained = FROZEN_ENCODERS[0] not in self._workload.freeze
        layer = layers.encoder_layer(spec, self._setup, tp, tokens, squares, is_trained=is_trained)
        embedding = layers.patch_embedding(spec, self._setup, tp, num_patches)
        # Patches have no gradient, but their weights have one; they are recomputed with the layers.
        embeddings = 2.0 * passes / 3.0 if is_trained else 1.0
        computing = spec.num_layers * passes * self._seconds((*layer.matrices, *layer.attention, *layer.moves))
        computing = computing + embeddings * self._seconds(embedding.matrices)
        computing = computing + self._seconds(layers.merging(spec, self._setup, tp, num_patches).matrices)
        computing = computing + reductions * self._communication.images_s(encoder, tp)
        if in_ranks:
            return computing
        rows = num_patches / spec.patches_per_row * (self._model.connector.feature_dim * self._setup.dtype_nbytes)
        sending = Operator("point_to_point", sent_nbytes=rows / tp)
        return np.maximum(computing, self._rules.seconds(sending, self._device, self._device.links.network))

    def encode_stages_s(self, encoder: str, tp: int) -> tuple[FloatArray, FloatArray]:
        """As ``ModuleTimes``; no data sheet tells how long decoding takes."""
        forward = self.images_s(encoder, tp)
        return np.zeros_like(forward), forward

    def sample_s(self, encoder: str, tp: int) -> float:
        """As ``ModuleTimes``."""
        return mean_with_images(self.images_s(encoder, tp), self._workload.images[encoder][0])

    def microbatch_s(self, replica_size: IntArray) -> FloatArray:
        """As ``ModuleTimes``; kernel launches are assumed to cost nothing."""
        return np.zeros(len(replica_size))

    @property
    def launch_s(self) -> float:
        """As ``ModuleTimes``; as ``microbatch_s``."""
        return 0.0

    @property
    def forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return 1.0 - BACKWARD_SHARE

    @property
    def pass_s(self) -> float:
        """As ``ModuleTimes``; as ``microbatch_s``."""
        return 0.0

    @property
    def pass_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return 1.0 - BACKWARD_SHARE

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """As ``ModuleTimes``; the optimizer's memory traffic."""
        moved = FLOAT32_NBYTES * _OPTIMIZER_PASSES[self._setup.optimizer] * num_parameters
        seconds: FloatArray = self._rules.seconds(Operator("optimizer", nbytes=moved), self._device)
        return seconds

    def slowdown(self, encoder: str) -> float | None:
        """As ``ModuleTimes``."""
        return None

    def first_backward_s(self, trained: FloatArray) -> FloatArray:
        """As ``ModuleTimes``; sums of gradients are not counted in any backward."""
        return np.zeros_like(trained)

    def ends_s(self, trained: FloatArray) -> FloatArray | None:
        """As ``ModuleTimes``."""
        return None

    @property
    def ends_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return 0.0

    @property
    def collectives(self) -> float:
        """As ``ModuleTimes``."""
        return 1.0

    def replicas_s(
        self, sharding: str, parameters: FloatArray, shards: FloatArray
    ) -> tuple[FloatArray, FloatArray] | None:
        """As ``ModuleTimes``."""
        return None

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        """As ``ModuleTimes``; data sheets are of accelerators."""
        return np.zeros_like(num_microbatches)

    def _seconds(self, operators: Iterable[Operator]) -> Any:
        """Seconds of operators one after another; 0 if there are none."""
        return sum(self._rules.seconds(each, self._device) for each in operators)
