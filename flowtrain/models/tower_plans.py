"""Tensor parallelism of frozen vision towers, with one plan for each type: transformers has none for most types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.parallel_layers import ColwiseLinear, RowwiseLinear, shard_bounds

_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")


def _plan(attention: str, output: str, mlp: str) -> dict[str, str]:
    """The plan of layers whose attention, its output and MLP have these names; covers plain and gated MLPs."""
    plan = {f"{attention}.{name}": "colwise" for name in _QUERY_KEY_VALUE} | {f"{attention}.{output}": "rowwise"}
    plan |= {f"{mlp}.{name}": "colwise" for name in ("fc1", "gate_proj", "up_proj")}
    return plan | {f"{mlp}.{name}": "rowwise" for name in ("fc2", "down_proj")}


TOWER_PLANS: Mapping[str, Mapping[str, str]] = {
    "clip_vision_model": _plan("encoder.layers.*.self_attn", "out_proj", "encoder.layers.*.mlp"),
    "siglip_vision_model": _plan("encoder.layers.*.self_attn", "out_proj", "encoder.layers.*.mlp"),
    "dinov2": _plan("encoder.layer.*.attention", "o_proj", "encoder.layer.*.mlp"),
    "dinov2_with_registers": _plan("encoder.layer.*.attention", "o_proj", "encoder.layer.*.mlp"),
    "vit": _plan("layers.*.attention", "o_proj", "layers.*.mlp"),
}
"""By ``model_type``: module names, with ``*`` for a layer's number, and how their weights are split."""


def parallelize_tower(tower: PreTrainedModel, mesh: DeviceMesh, key: str) -> None:
    """Split a frozen tower's layers over the ranks of ``mesh`` (one axis, size above 1), in place.

    Each rank has its share of the attention heads and of the MLP's features; embeddings, norms and everything after the
    layers stay whole. Split weights become plain tensors that hold only the rank's part, on the device ``meta``
    DTensors, which say which part that is: for inference. key: whose ``tensor_parallel_size`` it is, for messages.
    Raises ConfigError if the heads cannot be split evenly, or if the installed
    transformers builds such a tower in another way.
    """
    assert mesh.ndim == 1 and mesh.size() > 1, mesh
    num_heads = tower.config.num_attention_heads
    if num_heads % mesh.size():
        raise ConfigError(
            f"{key}.tensor_parallel_size ({mesh.size()}) does not divide the tower's num_attention_heads ({num_heads})"
        )
    plan, found = TOWER_PLANS[tower.config.model_type], set()
    for name, module in list(tower.named_modules()):
        pattern = re.sub(r"\b\d+\b", "*", name)
        style = plan.get(pattern)
        if style is not None:
            found.add(pattern.rpartition(".")[2])
            _SPLITS[style](cast(nn.Linear, module), mesh)
        for attribute in ("num_heads", "num_attention_heads"):
            if f"{pattern}.q_proj" in plan and hasattr(module, attribute):
                setattr(module, attribute, num_heads // mesh.size())
    if not found >= set(_QUERY_KEY_VALUE) or not found & {"fc1", "gate_proj"}:
        raise ConfigError(
            f"{key}.tensor_parallel_size: the installed transformers builds {tower.config.model_type} in a way that "
            "FlowTrain cannot split; set it to 1"
        )


def _split_columns(linear: nn.Linear, mesh: DeviceMesh) -> None:
    _keep(linear, "weight", 0, mesh)
    if linear.bias is not None:
        _keep(linear, "bias", 0, mesh)
    _become(linear, ColwiseLinear, mesh)
    linear.__dict__["enters_region"] = False  # no gradients


def _split_rows(linear: nn.Linear, mesh: DeviceMesh) -> None:
    _keep(linear, "weight", 1, mesh)
    _become(linear, RowwiseLinear, mesh)


_SPLITS = {"colwise": _split_columns, "rowwise": _split_rows}


def _keep(linear: nn.Linear, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Keep a part of a parameter, as a copy, so that the rest is freed."""
    whole = linear.get_parameter(name).detach()
    start, stop = shard_bounds(whole.shape[dim], mesh)
    part: Tensor = whole.narrow(dim, start, stop - start).clone()
    if whole.is_meta:
        part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    linear.register_parameter(name, nn.Parameter(part, requires_grad=False))


def _become(linear: nn.Linear, layer_class: type[nn.Linear], mesh: DeviceMesh) -> None:
    assert type(linear) is nn.Linear, linear
    linear.__class__ = layer_class
    linear.__dict__["tp_mesh"] = mesh
