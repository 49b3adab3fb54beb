"""Tensor parallelism of vision towers, with one plan for each type: transformers has none for most types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.attention_backends.base import Segments
from flowtrain.models.encoder_stage import EncoderStage
from flowtrain.models.parallel_layers import (
    ColwiseLinear,
    FusedColumnsLinear,
    RowwiseLinear,
    enter_region,
    leave_region,
    local_shard,
    own_fused_rows,
    shard_bounds,
    with_local_parameters,
)
from flowtrain.models.token_split import enter_split_region
from flowtrain.models.towers import TOWERS

_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")


def _plan(attention: str, output: str, mlp: str) -> dict[str, str]:
    """The plan of layers whose attention, its output and MLP have these names.

    Covers plain and gated MLPs, and norms of queries and keys over all heads.
    """
    plan = {f"{attention}.{name}": "colwise" for name in _QUERY_KEY_VALUE} | {f"{attention}.{output}": "rowwise"}
    plan |= {f"{mlp}.{name}": "colwise" for name in ("fc1", "gate_proj", "up_proj")}
    plan |= {f"{mlp}.{name}": "rowwise" for name in ("fc2", "down_proj")}
    return plan | {f"{attention}.{name}": "norm" for name in ("q_norm", "k_norm")}


TOWER_PLANS: Mapping[str, Mapping[str, str]] = {
    "clip_vision_model": _plan("encoder.layers.*.self_attn", "out_proj", "encoder.layers.*.mlp"),
    "siglip_vision_model": _plan("encoder.layers.*.self_attn", "out_proj", "encoder.layers.*.mlp"),
    "dinov2": _plan("encoder.layer.*.attention", "o_proj", "encoder.layer.*.mlp"),
    "dinov2_with_registers": _plan("encoder.layer.*.attention", "o_proj", "encoder.layer.*.mlp"),
    "vit": _plan("layers.*.attention", "o_proj", "layers.*.mlp"),
    "internvl_vision": _plan("encoder.layer.*.attention", "projection_layer", "encoder.layer.*.mlp"),
    "qwen3_vl_vision": {
        "blocks.*.attn.qkv": "fused",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.mlp.linear_fc1": "colwise",
        "blocks.*.mlp.linear_fc2": "rowwise",
    },
}
"""By ``model_type``: module names, with ``*`` for a layer's number, and how their weights are split. ``fused``: by
columns, queries, keys and values each."""


def check_tower_split(tower: PreTrainedModel, size: int, key: str) -> None:
    """Raise ConfigError if ``size`` ranks cannot split a tower's layers; needs neither ranks nor memory.

    key: whose ``tensor_parallel_size`` it is.
    """
    config = tower.config
    if config.num_attention_heads % size:
        raise ConfigError(
            f"{key}.tensor_parallel_size ({size}) does not divide the tower's num_attention_heads "
            f"({config.num_attention_heads})"
        )
    kind = TOWERS.get(config.model_type)
    if kind is not None and not len(cast(nn.ModuleList, tower.get_submodule(kind.layers))):
        return  # features are the embedding's, which every rank has whole
    found = {_pattern(name).rpartition(".")[2] for name, each in tower.named_modules() if _style(tower, name, each)}
    has_heads = "qkv" in found or found >= set(_QUERY_KEY_VALUE)
    if not has_heads or not found & {"fc1", "gate_proj", "linear_fc1"}:
        raise ConfigError(
            f"{key}.tensor_parallel_size: the installed transformers builds {config.model_type} in a way that "
            "FlowTrain cannot split; set it to 1"
        )


def _pattern(name: str) -> str:
    """A module's name, with ``*`` for numbers."""
    return re.sub(r"\b\d+\b", "*", name)


def _style(tower: PreTrainedModel, name: str, module: nn.Module) -> str | None:
    """How a module is split; None: it is not. HF has an identity in the place of a norm that a tower lacks."""
    style = TOWER_PLANS[tower.config.model_type].get(_pattern(name))
    return None if isinstance(module, nn.Identity) else style


def parallelize_tower(tower: PreTrainedModel, mesh: DeviceMesh, key: str) -> None:
    """Split a frozen tower's layers over the ranks of ``mesh`` (one axis, size above 1), in place.

    Each rank has its share of the attention heads and of the MLP's features; embeddings, norms and everything after the
    layers stay whole. Weights become plain tensors that hold only the rank's part: for inference. Raises as
    ``check_tower_split``.
    """
    assert mesh.ndim == 1 and mesh.size() > 1, mesh
    check_tower_split(tower, mesh.size(), key)
    for name, module in list(tower.named_modules()):
        style = _style(tower, name, module)
        if style is not None:
            _SPLITS[style](cast(nn.Linear, module), mesh)
            module.__dict__["enters_region"] = False  # no gradients
    _share_heads(tower, mesh)


def distribute_tower(stage: EncoderStage, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
    """Split a stage of the backbone's ranks, on the device ``meta``, in place: its tower, and how it runs that.

    Every parameter becomes a DTensor on ``mesh``, as ``tensor_parallel.parallelize`` has it. What is not split computes
    the same on all ranks, and its gradients are the same there, since those of split layers' inputs are summed.
    sequence_parallel: split norms and residuals of a trained tower's layers by tokens; a frozen one keeps none of them.
    Gradients of norms, layer scales and the biases of rowwise layers are then sums over the ranks, and stay ``Partial``
    without FSDP2.
    """
    tower, splits_tokens = stage.tower, sequence_parallel and stage.is_trained
    layers = next(iter(TOWER_PLANS[tower.config.model_type])).partition("*")[0]
    for name, module in list(tower.named_modules()):
        style = _style(tower, name, module)
        if style == "norm":
            _distribute(module, mesh, 0)
            _become_shared_norm(module, mesh)
        elif style is not None:
            assert type(module) is nn.Linear, module
            _distribute(module, mesh, _SPLIT_DIM[style])
            _become(module, _LAYER_CLASS[style], mesh)
        else:
            _distribute(module, mesh, None)
            if module._parameters and not name.startswith("embeddings"):
                is_sliced = splits_tokens and name.startswith(layers)
                module.__class__ = _with_local_parameters(type(module), is_sliced=is_sliced)  # type: ignore[arg-type]  # "unhashable"
    if embeddings := tower._modules.get("embeddings"):
        embeddings.__class__ = _with_local_tree(type(embeddings))
    _share_heads(tower, mesh)
    if splits_tokens:
        _split_between_regions(stage, mesh)


@cache  # FSDP keeps every class that it has wrapped, and a layer may have parameters of its own
def _with_local_parameters(module_class: type[nn.Module], *, is_sliced: bool) -> type[nn.Module]:
    """is_sliced: each rank applies them to its own tokens, so gradients add up over the ranks."""
    return with_local_parameters(module_class, [Partial()] if is_sliced else None)


def _split_between_regions(stage: EncoderStage, mesh: DeviceMesh) -> None:
    """Let attention and MLP gather their input's tokens, and leave each rank its slice of the output."""
    stage.token_mesh = mesh
    kind = TOWERS.get(stage.tower.config.model_type)
    if kind is not None and not kind.takes_mask:
        for layer in stage.layers:
            layer.__class__ = _taking_segments(type(layer))  # type: ignore[arg-type]  # "unhashable"
    for module in stage.tower.modules():
        if isinstance(module, RowwiseLinear):
            module.splits_tokens = True
        columns = [each for each in module.children() if isinstance(each, ColwiseLinear | FusedColumnsLinear)]
        for column in columns:
            column.enters_region = False
        if columns:
            module.register_forward_pre_hook(partial(_gather_tokens, mesh), with_kwargs=True)


@cache
def _taking_segments(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of layers that take a mask; HF's of InternVL take none, while their attention does."""

    class TakingSegments(layer_class):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, segments: Segments) -> Any:
            self.attention.__dict__["segments"] = segments
            return super().forward(hidden_states)

    TakingSegments.__name__ = layer_class.__name__
    return TakingSegments


def _gather_tokens(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather a module's first input. Segments tell attention's number of tokens; an MLP computes the padding too."""
    if "segments" in module.__dict__:
        kwargs = {**kwargs, "attention_mask": module.__dict__["segments"]}
    segments = next((each for each in (*args, *kwargs.values()) if isinstance(each, Segments)), None)
    num_tokens = None if segments is None else segments.num_tokens
    if args:
        return (enter_split_region(args[0], mesh, num_tokens), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": enter_split_region(kwargs["hidden_states"], mesh, num_tokens)}


def _distribute(module: nn.Module, mesh: DeviceMesh, dim: int | None) -> None:
    """Make a module's own parameters DTensors; dim: of the weight, along which it is split; None: on all ranks."""
    for name, parameter in module.named_parameters(recurse=False):
        splits = dim is not None and (name == "weight" or dim == 0)  # the bias of a rowwise layer is whole
        placement = Shard(dim) if splits and dim is not None else Replicate()
        tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def _with_local_tree(module_class: type[nn.Module]) -> type[nn.Module]:
    """As ``with_local_parameters``, for a module that also reads parameters of its children."""

    class WithLocalTree(module_class):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            whole = {module: module._parameters for module in self.modules()}
            for module, parameters in whole.items():
                module._parameters = {
                    name: None if parameter is None else local_shard(parameter)
                    for name, parameter in parameters.items()
                }
            try:
                return super().forward(*args, **kwargs)
            finally:
                for module, parameters in whole.items():
                    module._parameters = parameters

    WithLocalTree.__name__ = module_class.__name__
    return WithLocalTree


def _share_heads(tower: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Let attention modules know that a rank has a share of the heads."""
    config = tower.config
    plan, kind = TOWER_PLANS[config.model_type], TOWERS.get(config.model_type)
    for name, module in tower.named_modules():
        if not plan.keys() & {f"{_pattern(name)}.q_proj", f"{_pattern(name)}.qkv"}:
            continue
        for attribute in ("num_heads", "num_attention_heads"):
            if hasattr(module, attribute):
                setattr(module, attribute, config.num_attention_heads // mesh.size())
        if kind is not None and kind.heads_width is not None:
            setattr(module, kind.heads_width, config.hidden_size // mesh.size())


def _split_columns(linear: nn.Linear, mesh: DeviceMesh) -> None:
    _keep(linear, "weight", 0, mesh)
    if linear.bias is not None:
        _keep(linear, "bias", 0, mesh)
    _become(linear, ColwiseLinear, mesh)


def _split_fused_columns(linear: nn.Linear, mesh: DeviceMesh) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        part = own_fused_rows(parameter.detach(), mesh).clone()
        linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
    _become(linear, ColwiseLinear, mesh)


def _split_rows(linear: nn.Linear, mesh: DeviceMesh) -> None:
    _keep(linear, "weight", 1, mesh)
    _become(linear, RowwiseLinear, mesh)


def _split_norm(norm: nn.Linear, mesh: DeviceMesh) -> None:
    _keep(norm, "weight", 0, mesh)
    _become_shared_norm(norm, mesh)


_SPLITS = {"colwise": _split_columns, "rowwise": _split_rows, "fused": _split_fused_columns, "norm": _split_norm}
_SPLIT_DIM = {"colwise": 0, "rowwise": 1, "fused": None}
_LAYER_CLASS = {"colwise": ColwiseLinear, "rowwise": RowwiseLinear, "fused": FusedColumnsLinear}


def _keep(linear: nn.Linear, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Keep a part of a parameter, as a copy, so that the rest is freed."""
    whole = linear.get_parameter(name).detach()
    start, stop = shard_bounds(whole.shape[dim], mesh)
    part = whole.narrow(dim, start, stop - start).clone()
    linear.register_parameter(name, nn.Parameter(part, requires_grad=False))


def _become(linear: nn.Linear, layer_class: type[nn.Linear], mesh: DeviceMesh) -> None:
    assert type(linear) is nn.Linear, linear
    linear.__class__ = layer_class
    linear.__dict__["tp_mesh"] = mesh


class _SharedNorm(nn.Module):
    """An RMSNorm over all heads, of which a rank has its share: the mean of the squares is over all ranks."""

    weight: nn.Parameter
    variance_epsilon: float
    tp_mesh: DeviceMesh

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``[..., heads' width / ranks]``."""
        mesh, states = self.tp_mesh, hidden_states.to(torch.float32)
        squares = states.pow(2).sum(-1, keepdim=True)
        # Ranks compute different things with the sum, so its gradient is a sum over the ranks too.
        total = enter_region(leave_region(squares, mesh), mesh)
        scales = torch.rsqrt(total / (states.shape[-1] * mesh.size()) + self.variance_epsilon)
        normed: Tensor = local_shard(self.weight) * (states * scales).to(hidden_states.dtype)
        return normed


def _become_shared_norm(norm: nn.Module, mesh: DeviceMesh) -> None:
    assert {"weight"} == set(norm._parameters) and hasattr(norm, "variance_epsilon"), norm
    norm.__class__ = _SharedNorm
    norm.__dict__["tp_mesh"] = mesh
