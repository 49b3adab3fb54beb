"""The part of the model that one rank holds: sliced by pipeline stage, split by tensor, sharded over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.models.encoder_stage import EncoderShape, EncoderStage
from flowtrain.models.families.base import encoder_prefix
from flowtrain.models.initial_weights import InitialWeights, materialize
from flowtrain.models.stage import take_stage, tied_names
from flowtrain.models.tensor_parallel import parallelize
from flowtrain.models.tower_plans import distribute_tower
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.partition import Partition
from flowtrain.training.mesh import TP_AXIS, BackboneGroup

if TYPE_CHECKING:
    from flowtrain.models.backbone import Backbone

StageKey = tuple[StageModule, int]
"""Module and index of a stage within it."""


class BackboneSource(Protocol):
    """The part of a model family that the trainer needs."""

    @property
    def model_spec(self) -> ModelSpec:
        """The model's shapes, by which the pipeline is partitioned."""

    def backbone_skeleton(self) -> Backbone:
        """Connector and language model in float32 on the device ``meta``; frozen modules do not require gradients."""

    def backbone_weights(self) -> InitialWeights:
        """The skeleton's first values, the same for every rank."""


@runtime_checkable
class EncoderSource(Protocol):
    """What ``mode: monolithic`` needs of it too."""

    def encoder_skeleton(self, encoder: str) -> EncoderStage:
        """What is computed of an encoder, as ``backbone_skeleton``."""

    def encoder_weights(self, encoder: str) -> InitialWeights:
        """That skeleton's first values."""


@dataclass(frozen=True)
class Encoder:
    """The encoder of a monolithic pipeline."""

    name: str
    """In the configuration."""
    shape: EncoderShape
    """What images become in it."""


@dataclass(frozen=True)
class ModelChunks:
    """What a rank holds of the model."""

    backbone: Mapping[int, Backbone]
    """Stages of connector and language model by index, one FSDP root each."""
    vision: Mapping[int, EncoderStage]
    """Stages of the encoder by index; of a trained one an FSDP root each."""
    partition: Partition
    """All stages of the pipeline."""
    encoder: Encoder | None
    """None: the pipeline has no encoder."""
    hidden_size: int
    """Of the language model."""
    tied: Mapping[str, str]
    """Parameter names that share the values of another, ``{name: name it is stored under}``. If the pipeline puts both
    into different stages, each has its own parameter, and their gradients are summed before the update."""
    shards_parameters: bool
    """Whether parameters go back into shards after each use; else they do only after the step."""
    first_trained: int
    """Place in ``partition.stages`` of the first one with something to train; no gradient goes further back."""

    @property
    def stages(self) -> dict[StageKey, Backbone | EncoderStage]:
        """All stages of the rank."""
        vision = {(StageModule.ENCODER, index): stage for index, stage in self.vision.items()}
        return {**vision, **{(StageModule.BACKBONE, index): stage for index, stage in self.backbone.items()}}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole model; a stage lists a tied parameter once."""
        for prefix, module in self._named_stages():
            yield from module.named_parameters(prefix)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that belong in a checkpoint, by name."""
        for prefix, module in self._named_stages():
            if isinstance(module, EncoderStage) and not module.is_trained:
                continue
            state = module.state_dict(prefix=prefix and f"{prefix}.")
            yield from ((name, buffer) for name, buffer in module.named_buffers(prefix) if name in state)

    def _named_stages(self) -> Iterator[tuple[str, nn.Module]]:
        """Stages with what their names in the whole model begin with, without the last dot."""
        if self.encoder is not None:
            prefix = encoder_prefix(self.encoder.name).removesuffix(".")
            yield from ((prefix, stage) for stage in self.vision.values())
        yield from (("", stage) for stage in self.backbone.values())

    def stored_name(self, name: str) -> str:
        """The name of a parameter in a checkpoint."""
        return self.tied.get(name, name)

    def reshard(self) -> None:
        """Put every parameter back into shards, as a backward pass does; FSDP's call covers only one module."""
        for _, stage in self._named_stages():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode."""
        for _, module in self._named_stages():
            module.train(mode)


def build_chunks(
    config: RunConfig, source: BackboneSource, group: BackboneGroup, *, from_checkpoint: bool = False
) -> ModelChunks:
    """Build this rank's part of the model with its first values; collective.

    from_checkpoint: leave out the values that a checkpoint will bring.

    The model is sliced and sharded before it has memory: a rank holds its own shards and, while it fills them, at most
    one whole tensor.

    What is trained becomes DTensors on the group's ``dp_mesh``, or on that and ``tp``. A single rank shards the model
    too (FSDP2 then copies locally), so there is one path for mixed precision, checkpoints and gradients. A frozen
    encoder is whole on each replica, in the compute type.
    """
    partition = configured_partition(config, source.model_spec, group.degrees.pp)
    mine = partition.of_rank(group.pp_rank)
    whole, weights = source.backbone_skeleton().train(), source.backbone_weights()
    tied, last = tied_names(whole), len(partition.of_module(StageModule.BACKBONE)) - 1
    first_trained = _first_trained(config, whole, partition)
    backbone = {}
    for stage in (each for each in mine if each.module is StageModule.BACKBONE):
        flags = {"is_first": stage.index == 0, "is_last": stage.index == last}
        module = whole if last == 0 else take_stage(whole, stage.layers, **flags)
        if group.degrees.tp > 1:
            parallelize(module, group.mesh[TP_AXIS], sequence_parallel=config.backbone.sequence_parallel)
        _shard(module, module.decoder_layers, config, group)
        materialize(module, group.device, weights, from_checkpoint=from_checkpoint)
        backbone[stage.index] = module
    encoder, vision = None, dict[int, EncoderStage]()
    if partition.of_module(StageModule.ENCODER):
        assert isinstance(source, EncoderSource), source
        name = next(iter(config.encoders))
        tower = source.encoder_skeleton(name)
        encoder = Encoder(name, tower.shape)
        vision = _build_vision(config, tower, source.encoder_weights(name), partition, group, from_checkpoint)
    return ModelChunks(
        backbone=backbone,
        vision=vision,
        partition=partition,
        encoder=encoder,
        hidden_size=whole.language_model.config.hidden_size,
        tied=tied,
        shards_parameters=_shards_parameters(config, group),
        first_trained=first_trained,
    )


def _first_trained(config: RunConfig, whole: Backbone, partition: Partition) -> int:
    """As ``ModelChunks.first_trained``; every rank has the whole skeleton, so all find the same."""
    backbone = partition.of_module(StageModule.BACKBONE)
    if config.trains_encoders:
        return 0
    for stage in backbone:
        module = take_stage(whole, stage.layers, is_first=stage.index == 0, is_last=stage is backbone[-1])
        if any(parameter.requires_grad for parameter in module.parameters()):
            return partition.stages.index(stage)
    return 0


def _build_vision(
    config: RunConfig,
    tower: EncoderStage,
    weights: InitialWeights,
    partition: Partition,
    group: BackboneGroup,
    from_checkpoint: bool,
) -> dict[int, EncoderStage]:
    """This rank's encoder stages."""
    stages = partition.of_module(StageModule.ENCODER)
    if not tower.is_trained:
        tower.to(getattr(torch, config.model.dtype))
    vision = {}
    for stage in (each for each in stages if each.rank == group.pp_rank):
        module = tower.take(stage.layers, is_first=stage.index == 0, is_last=stage.index == len(stages) - 1)
        if group.degrees.tp > 1:
            distribute_tower(module, group.mesh[TP_AXIS], sequence_parallel=config.backbone.sequence_parallel)
        if tower.is_trained:
            _shard(module, module.layers, config, group)
        materialize(module, group.device, weights, from_checkpoint=from_checkpoint)
        vision[stage.index] = module
    return vision


def _shards_parameters(config: RunConfig, group: BackboneGroup) -> bool:
    """False with a single replica: it saves no memory, and would copy all parameters again for every microbatch."""
    return config.backbone.sharding != "gradients" and group.degrees.dp > 1


def _shard(module: nn.Module, layers: Sequence[nn.Module], config: RunConfig, group: BackboneGroup) -> None:
    """Wrap the layers and the root in FSDP2, which shards over the last axis of the group's ``dp_mesh``."""
    # Inputs are not cast: the loss weights among them must stay float32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if config.model.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, reshard = group.dp_mesh, _shards_parameters(config, group)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # FSDP keeps the root's own parameters whole, since the backward pass needs them first.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def as_fsdp(module: nn.Module) -> FSDPModule:
    """The same module, typed as an FSDP root."""
    assert isinstance(module, FSDPModule)
    return module
