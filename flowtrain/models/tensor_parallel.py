"""Tensor parallelism of a backbone, after Megatron-LM (Shoeybi et al., 2019, section 3), by the HF model's own plan.

Every parameter becomes a DTensor on the axis ``tp``: FSDP2, gradient clipping and checkpoints rely on that. Computation
uses the local shards as plain tensors, because dispatching DTensors would take longer than a small layer on a GPU.
Activations are plain tensors. Attention and MLP are a *region* each: the gradient of its input is summed over the ranks
once, and so is its output. Between regions all ranks have the same activations, or with sequence parallelism
(``flowtrain.models.token_split``) a slice of the tokens each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.backbone import Backbone
from flowtrain.models.parallel_layers import (
    ColwiseLinear,
    RowwiseLinear,
    VocabularyParallelEmbedding,
    enter_region,
    with_local_parameters,
)
from flowtrain.models.token_split import enter_split_region
from flowtrain.models.whole_config import tensor_parallel_plan

_SHARED_INPUTS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Layers of one module that all take the module's first input."""


def parallelize(backbone: Backbone, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
    """Split a backbone, or a stage of one, over the ranks of ``mesh`` (the axis ``tp``), in place.

    sequence_parallel: split norms and residuals by tokens; else every rank has them whole.

    Afterwards every parameter is a DTensor on ``mesh``; tied parameters stay tied, frozen ones stay frozen. The ranks
    must start from equal weights. FSDP2 can wrap the result, on another axis of the same parent mesh. Without FSDP2,
    gradients that are sums over the ranks (of ``q_norm``; with sequence parallelism of every norm) stay ``Partial`` and
    must be summed when they are used. Raises ConfigError if the model has no plan, or a plan with an unknown style.
    """
    assert mesh.ndim == 1 and mesh.size() > 1, mesh
    distribute = _Distributor(mesh)
    for module, style in checked_styles(backbone, mesh.size(), sequence_parallel=sequence_parallel).items():
        _APPLY[style](module, distribute)
    if sequence_parallel:
        _split_between_regions(backbone, mesh)
    else:
        _share_entrances(backbone, mesh)


def checked_styles(backbone: Backbone, size: int, *, sequence_parallel: bool = True) -> dict[nn.Module, str]:
    """How each module that has parameters of its own is split over ``size`` ranks; needs neither ranks nor memory.

    Raises ConfigError, naming the key of ``backbone``, if `parallelize` cannot split the model.
    """
    _check_heads(backbone, size)
    styles = _styles(backbone, size, sequence_parallel)
    if sequence_parallel:
        _check_entrances(backbone, styles)
    for module, style in styles.items():
        if style in _TAKES and type(module) is not _TAKES[style][0]:
            raise ConfigError(
                f"backbone.tensor_parallel_size ({size}): FlowTrain splits {_TAKES[style][0].__name__}, not its "
                f"variant {type(module).__name__} of {backbone.language_model.config.model_type}; set it to 1"
            )
        if style in ("embedding", "head"):
            _check_vocabulary(module, size)
    return styles


class _Distributor:
    """Turns a module's parameters into DTensors; a parameter that several modules share stays shared."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, module: nn.Module, **placements: Placement) -> None:
        """Place parameters by name; those not named are replicated."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in self._done:
                # No rank sends its weights: all ranks have the same.
                tensor = distribute_tensor(
                    parameter.detach(), self.mesh, [placements.get(name, Replicate())], src_data_rank=None
                )
                self._done[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module.register_parameter(name, self._done[parameter])


# --- styles --------------------------------------------------------------------------------------------------------


def _split_columns(module: nn.Module, distribute: _Distributor) -> None:
    _take_class(module, "colwise", distribute.mesh)
    distribute(module, weight=Shard(0), bias=Shard(0))


def _split_rows(module: nn.Module, distribute: _Distributor) -> None:
    _take_class(module, "rowwise", distribute.mesh)
    distribute(module, weight=Shard(1))


def _split_vocabulary(module: nn.Module, distribute: _Distributor) -> None:
    _take_class(module, "embedding", distribute.mesh)
    distribute(module, weight=Shard(0))


def _split_head(module: nn.Module, distribute: _Distributor) -> None:
    """Split the head's parameters only: the loss reads them, the module itself is never called."""
    distribute(module, weight=Shard(0), bias=Shard(0))


def _replicate(module: nn.Module, distribute: _Distributor) -> None:
    distribute(module)
    module.__class__ = with_local_parameters(type(module))


def _replicate_inside(module: nn.Module, distribute: _Distributor) -> None:
    """Replicate parameters that each rank applies to its own heads or tokens; gradients add up over the ranks."""
    distribute(module)
    module.__class__ = with_local_parameters(type(module), grad_placements=[Partial()])


_APPLY: Mapping[str, Callable[[nn.Module, _Distributor], None]] = {
    "colwise": _split_columns,
    "rowwise": _split_rows,
    "embedding": _split_vocabulary,
    "head": _split_head,
    "replicated": _replicate,
    "replicated_with_grad_allreduce": _replicate_inside,
}
_STYLES_OF_PLANS = ("colwise", "rowwise", "replicated_with_grad_allreduce")


_TAKES: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "colwise": (nn.Linear, ColwiseLinear),
    "rowwise": (nn.Linear, RowwiseLinear),
    "embedding": (nn.Embedding, VocabularyParallelEmbedding),
    "head": (nn.Linear, nn.Linear),
}
"""By style: the module's class before and after the split."""


def _take_class(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    module.__class__ = _TAKES[style][1]
    module.__dict__["tp_mesh"] = mesh


# --- which style for which module ------------------------------------------------------------------------------------


def _styles(backbone: Backbone, size: int, sequence_parallel: bool) -> dict[nn.Module, str]:
    """The style of every module that has parameters of its own."""
    language_model = backbone.language_model
    plan = _plan_styles(cast(PreTrainedModel, language_model.base_model), size)
    styles: dict[nn.Module, str] = {}
    # Without the split, what the plan does not name computes the same on all ranks.
    default = "replicated_with_grad_allreduce" if sequence_parallel else "replicated"
    for module in backbone.modules():
        if any(True for _ in module.parameters(recurse=False)):
            styles[module] = plan.get(module, default)
    parts = {"embedding": language_model.get_input_embeddings(), "head": language_model.get_output_embeddings()}
    if backbone.connector is not None:
        # Its rows are the same on all ranks, however tokens are split.
        for name, module in backbone.connector.named_modules():
            if module in styles:
                styles[module] = backbone.connector.tensor_parallel_plan.get(_pattern(name), "replicated")
    return styles | {module: style for style, module in parts.items() if module is not None}


def _pattern(name: str) -> str:
    """A module's name, with ``*`` for numbers."""
    return re.sub(r"\b\d+\b", "*", name)


def _plan_styles(base: PreTrainedModel, size: int) -> dict[nn.Module, str]:
    """Styles of a base model's modules by its configuration's plan; names in the plan have ``*`` for numbers."""
    plan = tensor_parallel_plan(base.config)
    unknown = sorted(set(plan.values()) - set(_STYLES_OF_PLANS))
    if unknown or not plan:
        reason = f"asks for {', '.join(unknown)}, which FlowTrain does not have" if plan else "is missing"
        raise ConfigError(
            f"backbone.tensor_parallel_size ({size}): transformers' tensor parallel plan of {base.config.model_type} "
            f"{reason}; set it to 1, or use a model like Qwen3 or Llama"
        )
    modules = dict(base.named_modules())
    styles = {name: plan[key] for name in modules if (key := _pattern(name)) in plan}
    for region in {name.rpartition(".")[0] for name in styles}:
        for name, _ in modules[region].named_parameters(prefix=region):
            # Its own gradient would be one rank's share, and the gradient that it passes on would count on every rank.
            if name.rpartition(".")[0] not in styles:
                raise ConfigError(
                    f"backbone.tensor_parallel_size ({size}): {name} of {base.config.model_type} is missing in "
                    "transformers' tensor parallel plan, which splits layers next to it; set it to 1"
                )
    return {modules[name]: style for name, style in styles.items()}


def _share_entrances(backbone: Backbone, mesh: DeviceMesh) -> None:
    """Let layers with the same input enter their region together: one sum in the backward pass instead of one each."""
    for module in backbone.modules():
        split = _column_layers(module)
        if split.keys() in _SHARED_INPUTS:
            _enter_at(module, split, lambda tensor, num_tokens: enter_region(tensor, mesh))


def _split_between_regions(backbone: Backbone, mesh: DeviceMesh) -> None:
    """Let regions of the language model gather their input's tokens, and leave each rank its slice of the output."""
    backbone.token_mesh = mesh
    for module in backbone.language_model.base_model.modules():
        if isinstance(module, RowwiseLinear):
            module.splits_tokens = True
        if split := _column_layers(module):
            _enter_at(module, split, lambda tensor, num_tokens: enter_split_region(tensor, mesh, num_tokens))


def _column_layers(module: nn.Module) -> dict[str, ColwiseLinear]:
    return {name: child for name, child in module.named_children() if isinstance(child, ColwiseLinear)}


def _enter_at(
    module: nn.Module, split: Mapping[str, ColwiseLinear], enter: Callable[[Tensor, int | None], Tensor]
) -> None:
    """Let a module enter the region for its layers; they all take the module's first input."""

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        num_tokens = kwargs.pop("num_tokens", None)
        if args:
            return (enter(args[0], num_tokens), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], num_tokens)}

    module.register_forward_pre_hook(before, with_kwargs=True)
    for child in split.values():
        child.enters_region = False


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_heads(backbone: Backbone, size: int) -> None:
    config = backbone.language_model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name)
        if count % size:
            raise ConfigError(f"backbone.tensor_parallel_size ({size}) does not divide {name} ({count})")


def _check_vocabulary(module: nn.Module, size: int) -> None:
    num_rows = len(module.get_parameter("weight"))
    if (size - 1) * -(-num_rows // size) >= num_rows:
        raise ConfigError(
            f"backbone.tensor_parallel_size ({size}) leaves ranks without any of {num_rows} vocabulary rows; lower it"
        )


def _check_entrances(backbone: Backbone, styles: Mapping[nn.Module, str]) -> None:
    """A region gathers tokens where its module is entered, so all its first layers must take the module's input."""
    for name, module in backbone.language_model.base_model.named_modules():
        split = {name for name, child in module.named_children() if styles.get(child) == "colwise"}
        if len(split) > 1 and split not in _SHARED_INPUTS:
            raise ConfigError(
                f"backbone.sequence_parallel: FlowTrain does not know that {', '.join(sorted(split))} of {name} in "
                f"{backbone.language_model.config.model_type} have the same input; set it to false"
            )
