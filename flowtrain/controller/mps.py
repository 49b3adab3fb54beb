"""Whether NVIDIA's MPS runs where processes share a device: without it they take turns on it instead of overlapping."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia")
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_ANSWER_S = 60.0


def lacks_mps() -> bool:
    """Whether this node has CUDA devices and no MPS daemon."""
    return _DRIVER.is_dir() and not Path(os.environ.get(_PIPES, _DEFAULT_PIPES)).is_dir()


def nodes_without_mps() -> list[str]:
    """Ask the nodes that have devices; returns the names of those that lack MPS. A node that is silent is left out."""
    ask: Any = ray.remote(_node_lacks_mps)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
    where = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in nodes]
    asked = [ask.options(num_cpus=0, scheduling_strategy=each).remote() for each in where]
    ready, silent = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    if silent:
        logger.warning("%d nodes did not answer whether MPS runs there", len(silent))
    return sorted(name for name in ray.get(ready) if name is not None)


def without_mps_text(nodes: Sequence[str]) -> str:
    """What follows from nodes without MPS, and the way out."""
    return (
        f"MPS does not run on {', '.join(nodes)}: encoder and rank of a device take turns on it; "
        f"start nvidia-cuda-mps-control -d there before `ray start` ({_PIPES}, or {_DEFAULT_PIPES}, shows that it runs)"
    )


def _node_lacks_mps() -> str | None:
    return socket.gethostname() if lacks_mps() else None
