"""Parallel degrees: how a module's ranks are numbered, and which degrees its layers allow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from flowtrain.costs.model_spec import TransformerSpec, VisionSpec


@dataclass(frozen=True, slots=True)
class Degrees:
    """Data x pipeline x tensor parallel degrees.

    Ranks are numbered with the tensor axis fastest, then the pipeline's, so that a tensor parallel group is a run of
    neighbouring ranks and fits on one node.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.tp

    @property
    def replica_size(self) -> int:
        """Ranks of one data parallel replica; they all work on the same microbatches."""
        return self.pp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (dp, pp, tp) of a rank."""
        replica, member = divmod(rank, self.replica_size)
        return replica, member // self.tp, member % self.tp

    def rank(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """Inverse of ``coordinates``."""
        return (dp_rank * self.pp + pp_rank) * self.tp + tp_rank

    def __str__(self) -> str:
        return f"dp={self.dp} pp={self.pp} tp={self.tp}"


def degree_faults(degrees: Degrees, spec: TransformerSpec, *, chunks_per_rank: int = 1) -> list[str]:
    """Say why a backbone cannot be split like that, naming the configuration's keys; empty where it can.

    chunks_per_rank: slices of the layers that each pipeline rank holds.
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
            # Shards of unequal shards: DTensor's bookkeeping of them, which weights and checkpoints go by, is wrong.
            faults.append(
                f"backbone.tensor_parallel_size ({degrees.tp}) does not divide the backbone's {name} ({count}), which "
                f"it must with backbone.data_parallel_size ({degrees.dp}) above 1"
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


def layers_by_rank(num_layers: int, pp: int, chunks_per_rank: int = 1) -> list[int]:
    """Return how many layers each pipeline rank has; rank r holds the stages r, r + pp, r + 2 pp and so on."""
    stages = [len(stage) for stage in split_layers(num_layers, pp * chunks_per_rank)]
    return [sum(stages[rank::pp]) for rank in range(pp)]


def encoder_degree_faults(
    name: str, tp: int, spec: VisionSpec, tower_type: str | None = None, splittable: Collection[str] = ()
) -> list[str]:
    """Say why an encoder's tower cannot be split like that, as ``degree_faults``; widths may be split unevenly.

    tower_type: of the tower, where it is known, which is to be one of those that there is a plan for.
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


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: contiguous runs whose lengths differ by at most one.

    Stages in the middle get the extra layers: the first also embeds, the last also computes the loss.
    """
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    each, extra = divmod(num_layers, num_stages)
    first_longer = (num_stages - extra) // 2
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + each + (first_longer <= stage < first_longer + extra))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
