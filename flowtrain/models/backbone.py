"""The backbone's root module: connector and language model, from token ids and vision features to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from flowtrain.models.activation_memory import applied
from flowtrain.models.attention_backends.base import SegmentOffsets
from flowtrain.models.connector import ConnectorModule
from flowtrain.models.deepstack import rows_added
from flowtrain.models.greedy import greedy_tokens
from flowtrain.models.loss import weighted_nll_sum
from flowtrain.models.token_split import join_tokens, slice_length, split_tokens
from flowtrain.pipeline.actions import MemoryStrategy, StageMemory


class Backbone(nn.Module):
    """Connector plus an HF causal language model, from embedding and merge to head and loss in one forward.

    Everything that has parameters runs inside this one module's forward, so that FSDP2 can wrap it as the root, with
    each decoder layer as a unit inside. The language model must use one of the attention implementations of
    ``flowtrain.models.attention``.

    A pipeline stage (``flowtrain.models.stage``) is a Backbone with only some of the modules: connector and embedding
    belong to the first stage, final norm and head to the last.

    memory: what decoder layers keep for the backward pass, unless a call gives its own strategy.
    """

    token_mesh: DeviceMesh | None = None
    """The ranks that split hidden states by tokens between regions (sequence parallelism); None: each has all."""

    def __init__(
        self,
        connector: ConnectorModule | None,
        language_model: PreTrainedModel,
        memory: MemoryStrategy = MemoryStrategy.KEEP,
    ) -> None:
        super().__init__()
        self.connector = connector
        self.language_model = language_model
        self.memory = memory

    @property
    def is_first_stage(self) -> bool:
        """Whether tokens and features enter here."""
        return self.connector is not None

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss comes out here."""
        return self.language_model.get_output_embeddings() is not None

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The language model's decoder layers in order, for wrapping."""
        return list(cast(nn.ModuleList, self.language_model.base_model.layers))

    def hidden_tokens(self, num_tokens: int) -> int:
        """Tokens of the hidden states that this rank takes from, and gives to, the neighbouring stages."""
        return num_tokens if self.token_mesh is None else slice_length(num_tokens, self.token_mesh.size())

    def compile_layers(self, backend: str = "inductor") -> None:
        """Let torch.compile compile every decoder layer's forward at its first call, once for all lengths."""
        for layer in self.decoder_layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)

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
        sequence_lengths: Sequence[int] | None = None,
        target_index: Tensor | None = None,
        next_index: Tensor | None = None,
        hidden: Tensor | None = None,
        memory: StageMemory | None = None,
        row_losses: Tensor | None = None,
    ) -> Tensor:
        """Return the float32 scalar ``sum_t weights[t] * nll[t]`` of one packed microbatch.

        Any stage except the last returns the hidden states after its layers instead, ``[1, T, H]``; with sequence
        parallelism this rank's slice of them, ``[1, ceil(T / tp), H]``.

        input_ids: int64 ``[T]``.
        targets: int64 ``[T]``, already shifted (the token after t), -100 for none.
        weights: float32 ``[T]``.
        position_ids: int64 ``[T]``, starting at 0 in every sequence; or ``[3, T]`` for a model whose positions
            have three axes (time, row, column).
        cu_seqlens: int32 ``[S + 1]``, offsets of the sequences, from 0 to T.
        max_seqlen: tokens of the longest sequence.
        features: ``[R, D]`` rows of the encoder, in any float type. With R = 0 the connector runs on no rows and gets
            zero gradients.
        feature_index: int64 ``[R]``, the token that each row replaces, no token twice.
        sequence_lengths: host copy of the lengths in cu_seqlens. If None, the host waits for the device to read them.
        target_index: int64 ``[n]``, tokens that have a target. If None, the host waits for the device to find them.
        next_index: int64 ``[n]``; if given, the last stage returns the likeliest token after each of these, int64
            ``[n]``, instead of the loss.
        hidden: what the stage before returned; None for a first stage.
        memory: what the decoder layers keep for the backward pass; None for the default.
        row_losses: float32 ``[n]``, filled with ``weights * nll`` of each token of ``target_index``, for a last stage.
        """
        assert weights.dtype == torch.float32, "weights were cast (FSDP's cast_forward_inputs?); they must stay float32"
        offsets = cu_seqlens.tolist() if sequence_lengths is None else [0, *accumulate(sequence_lengths)]
        assert offsets[-1] == input_ids.shape[0], (offsets, input_ids.shape)
        assert (hidden is None) == self.is_first_stage, "every stage except the first takes hidden states"
        num_tokens, mesh, options = len(input_ids), self.token_mesh, {}
        added: tuple[Tensor, ...] = ()
        if hidden is None:
            hidden, added = self._embed(input_ids, features, feature_index)
            if mesh is not None:
                hidden = split_tokens(hidden, mesh)
        if mesh is not None:
            options["num_tokens"] = num_tokens  # attention gathers as many
        layers = self.decoder_layers
        with applied(memory or self.memory, layers), rows_added(layers, added, feature_index, mesh):
            output = self.language_model.base_model(
                inputs_embeds=hidden,
                position_ids=position_ids[:, None] if position_ids.ndim == 2 else position_ids[None],
                use_cache=False,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                segment_offsets=SegmentOffsets(offsets),
                **options,
            )
        hidden = cast(Tensor, output.last_hidden_state)
        if not self.is_last_stage:
            # FSDP2 ends a microbatch's backward by a hook on its gradient, and if all is frozen so far there is none.
            return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
        if mesh is not None:
            hidden = join_tokens(hidden, mesh, num_tokens)
        head = self.language_model.get_output_embeddings()
        if next_index is not None:
            return greedy_tokens(hidden[0].index_select(0, next_index), head)
        return weighted_nll_sum(hidden[0], targets, weights, head, rows=target_index, row_losses=row_losses)

    def _embed(self, input_ids: Tensor, features: Tensor, feature_index: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embed the tokens, ``[1, T, H]``, and put the projected features in place of the image tokens.

        Also returns the rows ``[R, H]`` that are added after the first decoder layers.
        """
        assert self.connector is not None
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        projected = self.connector(features.to(self.connector.dtype or features.dtype))
        rows, *added = projected if isinstance(projected, tuple) else (projected,)
        # No view at the end: torch.compile would compile the first layer apart from the others.
        merged = embeddings[None].index_copy(1, feature_index, rows.to(embeddings.dtype)[None])
        return merged, tuple(added)
