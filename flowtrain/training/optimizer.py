"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from flowtrain.config.training import TrainingConfig
from flowtrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CONNECTOR = "connector"
BACKBONE = "backbone"


def module_of(parameter_name: str) -> str:
    """Which of the configuration's modules a parameter of the backbone network belongs to, by its qualified name."""
    return CONNECTOR if parameter_name.split(".", 1)[0] == CONNECTOR else BACKBONE


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The configured optimizer over the trainable parameters, one group per (module, decayed or not).

    Norms, biases and every other parameter of fewer than two dimensions get no weight decay. A group's ``peak_lr`` is
    the learning rate of its module. Call it after sharding: the state takes the parameters' placement. Raises
    ConfigError when every module is frozen.
    """
    overrides = {CONNECTOR: config.learning_rates.connector, BACKBONE: config.learning_rates.backbone}
    grouped: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grouped.setdefault((module_of(name), parameter.ndim >= 2), []).append(parameter)
    if not grouped:
        raise ConfigError("model.freeze leaves nothing to train; take connector or backbone out of it")
    groups = []
    for (module, decays), parameters in sorted(grouped.items(), key=lambda item: item[0]):
        override = overrides[module]
        peak_lr = config.learning_rate if override is None else override
        weight_decay = config.weight_decay if decays else 0.0
        groups.append({"params": parameters, "lr": peak_lr, "peak_lr": peak_lr, "weight_decay": weight_decay})
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    # Fused: one dispatch for all sharded parameters; per-parameter dispatch is ten times slower on small models.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def learning_rate_factor(step: int, num_steps: int, config: TrainingConfig) -> float:
    """Share of the peak learning rate that optimizer step ``step`` (1 .. num_steps) uses; a pure function.

    Rises linearly to 1 at step ``warmup_steps``, is 1 at the step after it, then falls towards
    ``min_learning_rate_ratio``, which the step after the last would reach (so no step is spent at a rate of zero).
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = min(1.0, (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    floor = config.min_learning_rate_ratio
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1.0 - floor) * (1.0 - progress)
        case "cosine":
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to ``factor`` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Gradients of the optimizer's parameters; a parameter without one counts as zero and is left out."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply gradients in place, local shards of DTensors included."""
    for gradient in gradients:
        _local(gradient).mul_(factor)


@torch.no_grad()
def clip_gradients(gradients: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale gradients in place so that their global L2 norm is at most ``max_norm`` (0: off); returns the norm before.

    A collective when gradients are DTensors: every rank must call it.
    """
    if not gradients:
        return 0.0
    total = torch.nn.utils.get_total_norm(list(gradients))
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
    coefficient = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does it
    if max_norm > 0 and coefficient < 1:
        scale_gradients(gradients, coefficient)
    return norm


def _local(tensor: torch.Tensor | DTensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
