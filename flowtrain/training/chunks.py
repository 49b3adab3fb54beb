"""The part of the backbone that one rank holds: sliced by pipeline stage, split by tensor, sharded over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flowtrain.config.run import RunConfig
from flowtrain.models.initial_weights import InitialWeights, materialize
from flowtrain.models.stage import take_stage, tied_names
from flowtrain.models.tensor_parallel import parallelize
from flowtrain.pipeline.partition import split_layers
from flowtrain.training.mesh import TP_AXIS, BackboneGroup

if TYPE_CHECKING:
    from flowtrain.models.backbone import Backbone


class BackboneSource(Protocol):
    """The part of a model family that the trainer needs."""

    def backbone_skeleton(self) -> Backbone:
        """Connector and language model in float32 on the device ``meta``; frozen modules do not require gradients."""

    def backbone_weights(self) -> InitialWeights:
        """The skeleton's first values, the same for every rank."""


@dataclass(frozen=True)
class ModelChunks:
    """What a rank holds of the model.

    stages: by global stage index, one FSDP root each.
    tied: parameter names that share the values of another, ``{name: name it is stored under}``. If the pipeline puts
        both on different ranks, each rank has its own parameter, and their gradients are summed before the update.
    shards_parameters: whether parameters go back into shards after each use; else they do only after the step.
    """

    stages: Mapping[int, Backbone]
    tied: Mapping[str, str]
    shards_parameters: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole model; a rank lists a tied parameter once."""
        for module in self.stages.values():
            yield from module.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that belong in a checkpoint, by name."""
        for module in self.stages.values():
            state = module.state_dict()
            yield from ((name, buffer) for name, buffer in module.named_buffers() if name in state)

    def stored_name(self, name: str) -> str:
        """The name of a parameter in a checkpoint."""
        return self.tied.get(name, name)

    def reshard(self) -> None:
        """Put every parameter back into shards, as a backward pass does; FSDP's call covers only one module."""
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode."""
        for module in self.stages.values():
            module.train(mode)


def build_chunks(
    config: RunConfig, source: BackboneSource, group: BackboneGroup, *, from_checkpoint: bool = False
) -> ModelChunks:
    """Build this rank's part of the model with its first values; collective.

    from_checkpoint: leave out the values that a checkpoint will bring.

    The model is sliced and sharded before it has memory: a rank holds its own shards and, while it fills them, at most
    one whole tensor.

    Pipeline rank i holds ``chunks_per_rank`` stages: i, i + pp, i + 2 pp, ... (interleaved 1F1B). Parameters become
    DTensors on the group's ``dp_mesh``, or on that and ``tp``. A single rank shards the model too (FSDP2 then copies
    locally), so there is one path for mixed precision, checkpoints and gradients.
    """
    whole, weights = source.backbone_skeleton().train(), source.backbone_weights()
    tied = tied_names(whole)
    stages = {}
    pp_size = group.degrees.pp
    layers = split_layers(len(whole.decoder_layers), pp_size * config.pipeline.chunks)
    for stage in range(group.pp_rank, len(layers), pp_size):
        module = whole if len(layers) == 1 else take_stage(whole, layers[stage])
        if group.degrees.tp > 1:
            parallelize(module, group.mesh[TP_AXIS], sequence_parallel=config.backbone.sequence_parallel)
        _shard(module, config, group)
        materialize(module, group.device, weights, from_checkpoint=from_checkpoint)
        stages[stage] = module
    return ModelChunks(stages, tied, _shards_parameters(config, group))


def _shards_parameters(config: RunConfig, group: BackboneGroup) -> bool:
    """False with a single replica: it saves no memory, and would copy all parameters again for every microbatch."""
    return config.backbone.sharding != "gradients" and group.degrees.dp > 1


def _shard(module: Backbone, config: RunConfig, group: BackboneGroup) -> None:
    """Wrap the decoder layers and the root in FSDP2, which shards over the last axis of the group's ``dp_mesh``."""
    # Inputs are not cast: the loss weights among them must stay float32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if config.model.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, reshard = group.dp_mesh, _shards_parameters(config, group)
    for layer in module.decoder_layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # FSDP keeps the root's own parameters whole, since the backward pass needs them first.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def as_fsdp(module: nn.Module) -> FSDPModule:
    """The same module, typed as an FSDP root."""
    assert isinstance(module, FSDPModule)
    return module
