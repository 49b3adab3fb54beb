"""Pipeline stages: slices of a backbone that keep its parameters' names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from flowtrain.models.backbone import Backbone

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class LayerSlice(nn.ModuleList):
    """Some of a model's layers, each under its number in the whole model: these numbers name parameters in checkpoints.

    Iteration and slices work as on a plain short list, because HF's forward uses it as one.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self._modules[str(number)] = layer

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]


def take_stage(backbone: Backbone, layers: range, *, is_first: bool, is_last: bool) -> Backbone:
    """Return the stage that holds these decoder layers of a whole backbone, sharing its modules.

    The first stage has connector and embedding; the last one has final norm and head. Parameters keep their qualified
    names. A stage of all layers is the whole backbone.
    """
    all_layers = backbone.decoder_layers
    language_model = shallow_copy(backbone.language_model)
    prefix = language_model.base_model_prefix
    base = shallow_copy(getattr(language_model, prefix))
    setattr(language_model, prefix, base)
    base.config = _config_of(base.config, layers)
    base.layers = LayerSlice({number: all_layers[number] for number in layers})
    if not is_first:
        base.set_input_embeddings(None)
    if not is_last:
        base.norm = nn.Identity()
        language_model.set_output_embeddings(None)
    return Backbone(backbone.connector if is_first else None, language_model, backbone.memory)


def _config_of(config: PreTrainedConfig, layers: range) -> PreTrainedConfig:
    """The configuration for HF's loop over these layers: the loop counts from 0, so kinds of layers must too."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return config
    config = copy.copy(config)
    config.layer_types = [types[number] for number in layers]
    config.num_hidden_layers = len(layers)
    return config


def tied_names(backbone: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter that has several: ``{name: first name}``."""
    first_names = {parameter: name for name, parameter in backbone.named_parameters()}
    every_name = backbone.named_parameters(remove_duplicate=False)
    return {name: first_names[parameter] for name, parameter in every_name if first_names[parameter] != name}


def shallow_copy(module: ModuleT) -> ModuleT:
    """Copy a module with its children shared, so that children can be replaced in the copy alone."""
    twin = copy.copy(module)
    for registry in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[registry] = dict(twin.__dict__[registry])
    return twin
