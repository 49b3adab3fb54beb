"""The backbone's root module: connector and language model, from token ids and vision features to the loss."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flowtrain.models.connector import Connector
from flowtrain.models.loss import weighted_nll_sum


class Backbone(nn.Module):
    """Connector plus an HF causal language model, from embedding and merge to head and loss in one forward.

    Everything that has parameters runs inside this one module's forward, so that FSDP2 may wrap it as the root (the
    decoder layers as units of their own). The language model must have been built with one of
    ``flowtrain.models.attention``'s implementations.
    """

    def __init__(self, connector: Connector, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.connector = connector
        self.language_model = language_model

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The language model's decoder layers in order, for wrapping."""
        return list(cast(nn.ModuleList, self.language_model.base_model.layers))

    def enable_activation_checkpointing(self) -> None:
        """Recompute every decoder layer in the backward pass; no parameter changes its name.

        Only ``forward`` is checkpointed, so that a layer's hooks (FSDP2's) stay outside and do not run twice.
        """
        for layer in self.decoder_layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(
        self,
        *,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        features: Tensor,
        feature_index: Tensor,
    ) -> Tensor:
        """Return the float32 scalar ``sum_t weights[t] * nll[t]`` of one packed microbatch.

        input_ids: int64 ``[T]``. targets: int64 ``[T]``, already shifted (the token after t), -100 for none. weights:
        float32 ``[T]``. position_ids: int64 ``[T]``, starting at 0 in every sequence. cu_seqlens: int32 ``[S + 1]``,
        offsets of the sequences, from 0 to T. max_seqlen: the longest one. features: ``[R, D]`` rows of the encoder, in
        any float type. feature_index: int64 ``[R]``, the token that each row replaces, no token twice. With R = 0 the
        connector runs on no rows and gets zero gradients.
        """
        assert weights.dtype == torch.float32, "weights were cast (FSDP's cast_forward_inputs?); they must stay float32"
        segment_offsets = cu_seqlens.tolist()
        assert segment_offsets[-1] == input_ids.shape[0], (segment_offsets, input_ids.shape)
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        projected = self.connector(features.to(self.connector.linear_1.weight.dtype))
        merged = embeddings.index_copy(0, feature_index, projected.to(embeddings.dtype))
        output = self.language_model.base_model(
            inputs_embeds=merged[None],
            position_ids=position_ids[None],
            use_cache=False,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            segment_offsets=segment_offsets,
        )
        return weighted_nll_sum(
            output.last_hidden_state[0], targets, weights, self.language_model.get_output_embeddings()
        )
