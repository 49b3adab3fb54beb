"""The parallel degrees that the layers of a module allow."""

from __future__ import annotations

from collections.abc import Collection

from flowtrain.costs.model_spec import TransformerSpec, VisionSpec
from flowtrain.types.plan import Degrees


def degree_faults(degrees: Degrees, spec: TransformerSpec, *, chunks_per_rank: int = 1) -> list[str]:
    """Return the reasons why a backbone cannot be split by these degrees; empty if it can.

    Reasons name the configuration's keys. chunks_per_rank: slices of the layers that each pipeline rank holds.
    """
    faults = []
    for name, count in (("attention heads", spec.num_heads), ("key-value heads", spec.num_kv_heads)):
        if count % degrees.tp:
            faults.append(
                f"backbone.tensor_parallel_size ({degrees.tp}) does not divide the backbone's {name} ({count})"
            )
    if spec.intermediate_size % degrees.tp:
        faults.append(
            f"backbone.tensor_parallel_size ({degrees.tp}) does not divide the backbone's intermediate_size "
            f"({spec.intermediate_size})"
        )
    for name, count in (("vocab_size", spec.vocab_size), ("hidden_size", spec.hidden_size)):
        if degrees.dp > 1 and count % degrees.tp:
            # DTensor's bookkeeping for shards of unequal shards is wrong; weights and checkpoints depend on it.
            faults.append(
                f"backbone.tensor_parallel_size ({degrees.tp}) does not divide the backbone's {name} ({count}); it "
                f"must with backbone.data_parallel_size ({degrees.dp}) above 1"
            )
    if chunks_per_rank > 1 and degrees.pp == 1:
        faults.append(
            f"backbone.chunks_per_rank ({chunks_per_rank}) needs backbone.pipeline_parallel_size of at least 2 (now 1)"
        )
    if degrees.pp * chunks_per_rank > spec.num_layers:
        faults.append(
            f"backbone.pipeline_parallel_size ({degrees.pp}) times backbone.chunks_per_rank ({chunks_per_rank}) is "
            f"more than the backbone's layers ({spec.num_layers}); lower one of them"
        )
    return faults


def encoder_degree_faults(
    name: str, tp: int, spec: VisionSpec, tower_type: str | None = None, splittable: Collection[str] = ()
) -> list[str]:
    """Return the reasons why an encoder's tower cannot be split like this; empty if it can.

    Widths may be split unevenly. tower_type: type of the tower; None: unknown. splittable: the types that have a tensor
    parallel plan; a known type must be one of them.
    """
    if tp == 1:
        return []
    faults, key = [], f"encoders.{name}.tensor_parallel_size ({tp})"
    if tower_type is not None and tower_type not in splittable:
        faults.append(
            f"{key} above 1 has no plan for a tower of type {tower_type!r}; set it to 1, or use one of "
            f"{', '.join(splittable)}"
        )
    if spec.num_heads % tp:
        faults.append(f"{key} does not divide the tower's attention heads ({spec.num_heads})")
    return faults
