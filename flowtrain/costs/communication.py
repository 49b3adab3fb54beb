"""Communication inside a tensor parallel group: ring all-reduces of hidden states over the node's links."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray
from flowtrain.costs.model_spec import FROZEN_ENCODERS, ModelSpec
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.costs.workload import Workload

_GATHER = 0.5
"""A gather of all tokens moves half the bytes of an all-reduce."""


class TensorCommunication:
    """Seconds of the all-reduces of a layer, the head or a sample's images; no overlap is assumed.

    A decoder layer has two in forward, two in backward and two more if it is recomputed; an encoder's layer has two.
    With sequence parallelism a gather and a reduce-scatter take the place of each, with the same bytes; layers that
    keep the results of products gather their inputs again, and the loss gathers all tokens.
    """

    def __init__(
        self,
        device_type: DeviceType,
        model: ModelSpec,
        workload: Workload,
        setup: TrainingSetup,
        link_efficiency: float,
    ) -> None:
        self.model, self._workload, self.setup = model, workload, setup
        self._bandwidth = device_type.links.node * link_efficiency

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of one decoder layer, ``[N]``."""
        num_reduces = 4.0 + 2.0 * recomputed_share(self.setup)
        if self.setup.sequence_parallel:
            num_reduces += 2.0 * _GATHER * self.setup.share_of_layers("selective")
        return self._factor(tp) * num_reduces * self.model.backbone.hidden_size * num_tokens

    def head_s(self, num_tokens: FloatArray, num_target_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds for the gradient of the hidden states that carry loss, ``[N]``."""
        reduced = num_target_tokens + (_GATHER if self.setup.sequence_parallel else 0.0) * num_tokens
        return self._factor(tp) * self.model.backbone.hidden_size * reduced

    def images_s(self, encoder: str, tp: int) -> FloatArray:
        """Return seconds of the forward for each representative sample's images, ``[S]``."""
        spec, (_, num_patches) = self.model.encoders[encoder], self._workload.images[encoder]
        return self._factor(tp) * 2.0 * spec.num_layers * spec.hidden_size * num_patches.astype(np.float64)

    def _factor(self, tp: int) -> float:
        """Seconds per reduced number: a ring moves nearly all data twice."""
        return self.setup.dtype_nbytes * 2.0 * (tp - 1) / tp / self._bandwidth


def encoder_passes(setup: TrainingSetup, freeze: Collection[str]) -> tuple[float, float]:
    """Return how often an encoder's forward is computed, and how often its all-reduces run; a backward takes two.

    A trained encoder recomputes as ``TrainingSetup.of_encoder`` tells.
    """
    if FROZEN_ENCODERS[0] in freeze:
        return 1.0, 1.0
    again = setup.share_of_encoder_layers("full")
    # Two gathers are half of a forward's two all-reduces.
    gathers = _GATHER * setup.share_of_encoder_layers("selective") if setup.sequence_parallel else 0.0
    return 3.0 + again, 2.0 + again + gathers


def recomputed_share(setup: TrainingSetup) -> float:
    """Return the share of layers whose forward runs twice; 0 where no matrix product is repeated."""
    return setup.share_of_layers("full")
