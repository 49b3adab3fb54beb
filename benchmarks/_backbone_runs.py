"""The two trainers compared: FlowTrain's backbone on packed microbatches, and plain HF loops on batches of rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from shared.backbone_data import FEATURE_DIM, PlainBatch
from shared.text_source import TextSource
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from flowtrain.config.run import RunConfig
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec
from flowtrain.models.attention import implementation_name, resolve_attention
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.initial_weights import BuiltWeights
from flowtrain.pipeline.configured import configured_strategy
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import IGNORED_LABEL, PackedBatch
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, StepPlan

LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, NUM_STEPS = 1e-4, 1.0, 0.1, 1000


def _llama(**shape: Any) -> LlamaConfig:
    return LlamaConfig(**shape, tie_word_embeddings=True, rms_norm_eps=1e-5)


MODELS: dict[str, PreTrainedConfig] = {
    "small": Qwen3Config(
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        vocab_size=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": _llama(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
    ),
    "qwen3-1.7b": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}
"""Shapes to measure on, with random weights."""


def specs_of(model: str) -> tuple[TransformerSpec, ConnectorSpec]:
    """The cost model's description of a shape."""
    spec = from_hf_text_config(MODELS[model].to_dict())
    return spec, ConnectorSpec(FEATURE_DIM, spec.hidden_size, spec.hidden_size)


@dataclass(frozen=True)
class Setting:
    """Settings that both trainers share. backbone: further keys of the configuration's section."""

    model: str
    dtype: str
    num_threads: int
    device: torch.device
    backbone: dict[str, Any]

    def run_config(self) -> RunConfig:
        """The configuration of FlowTrain's run; its paths are not used, since the benchmark builds the model."""
        return RunConfig.model_validate(
            {
                "name": "benchmark",
                "model": {"dtype": self.dtype},
                "encoders": {"vision": {"path": "unused"}},
                "backbone": {"path": "unused", "num_threads": self.num_threads, **self.backbone},
                "data": {"sources": [{"path": "unused"}]},
                "training": {
                    "max_steps": NUM_STEPS,
                    "global_batch_size": 1,
                    "learning_rate": LEARNING_RATE,
                    "lr_schedule": "constant",
                    "max_grad_norm": MAX_GRAD_NORM,
                    "weight_decay": WEIGHT_DECAY,
                    "loss_normalization": "token",
                },
            }
        )

    def language_model(self, attention: str, device: torch.device | None = None) -> PreTrainedModel:
        """The model, with the same random weights in every call, float32; device: None for the setting's."""
        torch.manual_seed(7)
        config = copy.deepcopy(MODELS[self.model])  # the model keeps it, with its kind of attention
        with device or self.device:
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


@dataclass(frozen=True)
class _Source(TextSource):
    """The trainer's model source: the benchmark's language model, with a connector that gets no rows."""

    setting: Setting

    def backbone_skeleton(self) -> Backbone:
        skeleton, backbone = self._backbone(torch.device("meta")), self.setting.run_config().backbone
        skeleton.memory = configured_strategy(backbone)
        if backbone.compile:
            skeleton.compile_layers()
        return skeleton

    def backbone_weights(self) -> BuiltWeights:
        return BuiltWeights(lambda: self._backbone(self.setting.device))

    def _backbone(self, device: torch.device) -> Backbone:
        config, dtype = self.setting.run_config(), getattr(torch, self.setting.dtype)
        backend = resolve_attention(config.backbone.attention, self.setting.device, dtype)
        model = self.setting.language_model(implementation_name(backend), device)
        with device:
            return Backbone(Connector(FEATURE_DIM, model.config.hidden_size), model)


class Ours:
    """FlowTrain's trainer on one rank, in this process, without Ray."""

    def __init__(self, setting: Setting) -> None:
        self._group: BackboneGroup = init_backbone_group(0, Degrees(), setting.device)
        self._dtype = getattr(torch, setting.dtype)
        self.trainer = Trainer(setting.run_config(), _Source(setting), self._group, NUM_STEPS)

    def step(self, plan: StepPlan, batches: Sequence[PackedBatch]) -> float:
        """One optimizer step; returns its loss."""
        waiting = iter([replace(batch, features=batch.features.to(self._dtype)) for batch in batches])
        execute(self.trainer.begin_unit(plan), self.trainer.stages, lambda _: next(waiting), lambda _: None)
        return self.trainer.finish_unit().loss

    def close(self) -> None:
        """Leave the process group."""
        self._group.close()


class PlainHF:
    """A plain loop around an HF model: sdpa, fused AdamW over float32 weights, accumulated microbatches.

    In bfloat16 the model computes with a copy of the weights, renewed after each update, and gradients are summed in
    float32. FlowTrain computes with the same numbers; autocast would be slower, as it casts the weights in every
    microbatch.
    """

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self.model = setting.language_model("sdpa").to(setting.device).train()
        self._computed_with = list(self.model.parameters())
        self._weights = self._computed_with
        if setting.dtype != "float32":
            self._weights = [nn.Parameter(parameter.detach().clone()) for parameter in self._computed_with]
            for parameter in self._computed_with:  # buffers stay float32, as HF loads them
                parameter.data = parameter.data.to(getattr(torch, setting.dtype))
        decayed = [weight for weight in self._weights if weight.ndim >= 2]
        others = [weight for weight in self._weights if weight.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def step(self, batches: Sequence[PlainBatch]) -> float:
        """One optimizer step over the mean loss of all tokens that have a target; returns the loss."""
        num_targets = sum(int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self._loss(batch, num_targets)
            loss.backward()
            total += loss.detach().item()
            self._take_gradients()
        nn.utils.clip_grad_norm_(self._weights, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._weights is not self._computed_with:
            with torch.no_grad():
                torch._foreach_copy_(self._computed_with, self._weights)
        return total

    def _take_gradients(self) -> None:
        """Add a microbatch's gradients to those of the float32 weights, if the model computes with a copy of them."""
        if self._weights is self._computed_with:
            return
        for weight, computed_with in zip(self._weights, self._computed_with, strict=True):
            gradient, computed_with.grad = computed_with.grad, None
            assert gradient is not None, "every parameter takes part"
            if weight.grad is None:
                weight.grad = gradient.to(weight.dtype)
            else:
                weight.grad.add_(gradient)

    def _loss(self, batch: PlainBatch, num_targets: int) -> torch.Tensor:
        """HF's own loss: all rows pass the head, the sum in float32 over the step's number of targets."""
        ids, labels = batch.input_ids.to(self._device), batch.labels.to(self._device)
        mask = None if batch.attention_mask is None else batch.attention_mask.to(self._device)
        output = self.model(
            input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, num_items_in_batch=num_targets
        )
        loss: torch.Tensor = output.loss
        return loss
