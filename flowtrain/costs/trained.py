"""What of a model is trained, counted by the names and shapes of its weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from flowtrain.config.parameter_names import BACKBONE, CONNECTOR, MODULES, ParameterNames, module_of
from flowtrain.costs.model_spec import ModelSpec, TrainedBackbone

_LAYER = re.compile(r"(?P<base>.+?\.)layers\.(?P<number>\d+)\.")
"""A decoder layer's weight: the language model's trunk before it, and the number of the layer."""


def with_frozen(
    model: ModelSpec,
    shapes: Mapping[str, Sequence[int]],
    tied: Mapping[str, str],
    freeze: Sequence[str],
    *,
    trains_encoders: bool,
) -> ModelSpec:
    """Return the model's shapes with what ``model.freeze`` leaves to train.

    shapes, tied: of the backbone's weights, by name. Outside of the decoder layers, the trunk has the embedding (a
    matrix) and the final norm; the head lies beside it.
    """
    frozen = ParameterNames.of(shapes, tied).frozen(freeze)
    layers, matrices = ([0] * model.backbone.num_layers for _ in range(2))
    connector = embedding = norm = head = 0
    trunk = next((match["base"] for name in shapes if (match := _in_layer(name))), "")
    for name in shapes.keys() - tied.keys() - frozen:
        shape, match = shapes[name], _in_layer(name)
        count, is_matrix = prod(shape), len(shape) > 1
        if module_of(name) == CONNECTOR:
            connector += count
        elif match:
            layers[int(match["number"])] += count
            matrices[int(match["number"])] += count * is_matrix
        elif not name.startswith(trunk):
            head += count
        elif is_matrix:
            embedding += count
        else:
            norm += count
    reaches = trains_encoders or connector > 0 or embedding > 0
    trained = TrainedBackbone(tuple(layers), tuple(matrices), embedding, norm, head, reaches)
    return replace(
        model,
        backbone=replace(model.backbone, trained=trained),
        connector=replace(model.connector, trained=connector),
    )


def _in_layer(name: str) -> re.Match[str] | None:
    return None if module_of(name) == CONNECTOR else _LAYER.match(name)


def with_frozen_modules(model: ModelSpec, freeze: Collection[str], *, trains_encoders: bool) -> ModelSpec:
    """As ``with_frozen`` for a model whose weights have no names; freeze: modules."""
    if set(MODULES).isdisjoint(freeze):
        return model
    spec, is_trained = model.backbone, BACKBONE not in freeze
    table, connector = is_trained * spec.head_parameters, (CONNECTOR not in freeze) * model.connector.num_parameters
    trained = TrainedBackbone(
        layers=(is_trained * spec.layer_parameters,) * spec.num_layers,
        matrices=(is_trained * spec.layer_matmul_parameters,) * spec.num_layers,
        embedding=table,
        norm=is_trained * spec.hidden_size,
        head=0 if spec.tied_embeddings else table,
        reaches_layers=is_trained or connector > 0 or trains_encoders,
    )
    return replace(
        model, backbone=replace(spec, trained=trained), connector=replace(model.connector, trained=connector)
    )
