"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flowtrain.config.parameter_names import module_of, names_of
from flowtrain.config.training import TrainingConfig
from flowtrain.models.parallel_layers import local_shard

_NORM_ELEMENTS = 1 << 14


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: TrainingConfig,
    tied: Mapping[str, str] | None = None,
) -> torch.optim.Optimizer:
    """The configured optimizer over what is trained, with one group per (module, learning rate, decayed or not).

    Norms, biases and every other parameter of fewer than two dimensions get no weight decay. A group's ``peak_lr`` is
    the learning rate of its parameters. tied: further names of parameters that have several, ``{name: first name}``; a
    pattern that matches one of them gives its rate to each stage's copy. Call it after sharding: the state takes the
    parameters' placement. If a pipeline stage has nothing to train, its optimizer has no parameters.
    """
    grouped: dict[tuple[str, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            override = config.learning_rates.rate_of(names_of(name, tied or {}))
            peak_lr = config.learning_rate if override is None else override
            grouped.setdefault((module_of(name), peak_lr, parameter.ndim >= 2), []).append(parameter)
    if not grouped:
        return torch.optim.SGD([{"params": [], "peak_lr": 0.0}], lr=0.0)
    groups = []
    for (_, peak_lr, decays), parameters in sorted(grouped.items(), key=lambda item: item[0]):
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
        local_shard(gradient).mul_(factor)


@torch.no_grad()
def sum_of_squares(gradients: Sequence[torch.Tensor]) -> float:
    """This rank's share of the squared L2 norm of gradients; the shares of all ranks add up to the whole.

    A gradient that is replicated on n ranks counts 1/n on each of them.
    """
    if not gradients:
        return 0.0
    pieces = [_pieces(local_shard(gradient)) for gradient in gradients]
    norms = iter(torch.stack(list(torch._foreach_norm(list(chain.from_iterable(pieces))))).tolist())
    squares = [sum(norm**2 for norm in islice(norms, len(each))) for each in pieces]
    return sum(square / num_replicas(gradient) for square, gradient in zip(squares, gradients, strict=True))


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a tensor for its norm on a CPU, where torch adds up squares in float32: 5e7 of them are off by 0.8 %."""
    return tensor.reshape(-1).split(_NORM_ELEMENTS) if tensor.device.type == "cpu" else [tensor]


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor for gradients so that their global L2 norm is at most ``max_norm`` (0: off)."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0  # as torch.nn.utils.clip_grad_norm_ does it


def num_replicas(tensor: torch.Tensor) -> int:
    """Number of ranks that hold the same values."""
    if not isinstance(tensor, DTensor):
        return 1
    counts: list[int] = [
        tensor.device_mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_replicate()
    ]
    return math.prod(counts)
