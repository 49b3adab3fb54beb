"""What of a run decides its times, and with what it computes: by these a profile is told from another run's."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec

_LIBRARIES = ("flowtrain", "torch", "transformers")


def model_facts(config: RunConfig, model: ModelSpec) -> dict[str, Any]:
    """Return shapes and settings that decide how long a module takes; neither degrees nor data are among them."""
    backbone = config.backbone
    return {
        **asdict(model),
        "dtype": config.model.dtype,
        "freeze": list(config.model.freeze),
        "optimizer": config.training.optimizer,
        "attention": backbone.attention,
        "sharding": backbone.sharding,
        "activation_checkpointing": backbone.activation_checkpointing,
        "checkpoint_every": backbone.checkpoint_every,
        "compile": backbone.compile,
        "threads": {"backbone": backbone.num_threads}
        | {name: encoder.num_threads for name, encoder in config.encoders.items()},
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute, without what they were built for (``+cu130``)."""
    return {name: version(name).partition("+")[0] for name in _LIBRARIES}
