"""What the driver asks of a node and what the node answers: models of the hub, and what a cluster check finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub that a run reads."""

    repo_id: str
    key: str
    """The configuration key that names it."""
    has_weights: bool
    """Whether weights are read, not only settings and the tokenizer."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """How far a node's download is; bytes of all models."""

    done_nbytes: int
    total_nbytes: int | None
    """None: not known yet, or the node does not reach the hub."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a process on a node sees, other than memory."""

    versions: Mapping[str, str | None]
    """By package, and of Python; None: not installed."""
    sees_runs_dir: bool
    """Whether the node sees what the driver has written beside the runs."""
    can_write: bool
    """Whether it may write there."""
    has_rdma: bool
    """Whether the node has network devices that read memory by themselves."""
    cache_free_nbytes: int
    """Free space where models from the hub are kept."""
    to_fetch_nbytes: int = 0
    """Bytes of models that the cache lacks."""
    no_hub: str | None = None
    """Why models that the cache lacks cannot be fetched; None if they can, or if none are lacking."""
    lacks_mps: bool = False
    """Whether it has CUDA devices and no MPS daemon."""
    clock_s: float = 0.0
    """The node's clock minus the driver's."""
    clock_error_s: float = 0.0
    """Half of the round trip by which ``clock_s`` was measured."""
