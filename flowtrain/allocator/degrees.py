"""The parallel degrees that the layers of a module allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flowtrain.costs.model_spec import TransformerSpec, VisionSpec
from flowtrain.errors import Fault, FaultCode
from flowtrain.types.plan import Degrees

_TP = "backbone.tensor_parallel_size"
_PP = "backbone.pipeline_parallel_size"
_CHUNKS = "pipeline.chunks"


def degree_faults(degrees: Degrees, spec: TransformerSpec, *, chunks_per_rank: int = 1) -> list[Fault]:
    """Return the reasons why a backbone cannot be split by these degrees; empty if it can.

    Reasons name the configuration's keys. chunks_per_rank: slices of the layers that each pipeline rank holds.
    """
    faults = [Fault(_TP, FaultCode.DEGREES, text) for text in _tensor_faults(degrees, spec)]
    if chunks_per_rank > 1 and degrees.pp == 1:
        text = f"{_CHUNKS} ({chunks_per_rank}) needs {_PP} of at least 2 (now 1)"
        faults.append(Fault(_CHUNKS, FaultCode.DEGREES, text))
    if degrees.pp * chunks_per_rank > spec.most_stages:
        together = "" if spec.first_layers == 1 else f", of which the first {spec.first_layers} must lie in one stage"
        text = (
            f"{_PP} ({degrees.pp}) times {_CHUNKS} ({chunks_per_rank}) is more than the backbone's layers "
            f"({spec.num_layers}{together}); lower one of them"
        )
        faults.append(Fault(_PP, FaultCode.DEGREES, text))
    return faults


def encoder_degree_faults(
    name: str, tp: int, spec: VisionSpec, tower_type: str | None = None, splittable: Collection[str] = ()
) -> list[Fault]:
    """Return the reasons why an encoder's tower cannot be split like this; empty if it can.

    Widths may be split unevenly. tower_type: type of the tower; None: unknown. splittable: the types that have a tensor
    parallel plan; a known type must be one of them.
    """
    if tp == 1:
        return []
    key, texts = f"encoders.{name}.tensor_parallel_size", []
    if tower_type is not None and tower_type not in splittable:
        texts.append(
            f"{key} ({tp}) above 1 has no plan for a tower of type {tower_type!r}; set it to 1, or use one of "
            f"{', '.join(splittable)}"
        )
    if spec.num_heads % tp:
        texts.append(f"{key} ({tp}) does not divide the tower's attention heads ({spec.num_heads})")
    return [Fault(key, FaultCode.DEGREES, text) for text in texts]


def _tensor_faults(degrees: Degrees, spec: TransformerSpec) -> Iterator[str]:
    divided = (
        ("attention heads", spec.num_heads),
        ("key-value heads", spec.num_kv_heads),
        ("intermediate_size", spec.intermediate_size),
    )
    for name, count in divided:
        if count % degrees.tp:
            yield f"{_TP} ({degrees.tp}) does not divide the backbone's {name} ({count})"
    for name, count in (("vocab_size", spec.vocab_size), ("hidden_size", spec.hidden_size)):
        if degrees.dp > 1 and count % degrees.tp:
            # DTensor's bookkeeping for shards of unequal shards is wrong; weights and checkpoints depend on it.
            yield (
                f"{_TP} ({degrees.tp}) does not divide the backbone's {name} ({count}), but it must if "
                f"backbone.data_parallel_size ({degrees.dp}) is above 1"
            )
