"""Checks the weights that a run starts from before anything starts."""

from __future__ import annotations

from flowtrain.config.run import RunConfig
from flowtrain.controller.reach import usable_checkpoint
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.weight_files import holds_weights
from flowtrain.observability.run_dir import run_dir


def check_first_weights(config: RunConfig, resume: bool = False) -> None:
    """Raise ConfigError if the weights of local directories do not fit the model; only their headers are read.

    Directories without any weights are left out: a driver need not have what the nodes have.

    resume: a run that goes on from a checkpoint has started with its weights before, so nothing is checked.
    """
    paths = [config.model.path, config.backbone.path, *(encoder.path for encoder in config.encoders.values())]
    if config.emulation is not None or not any(path is not None and holds_weights(path) for path in paths):
        return
    if resume and usable_checkpoint(run_dir(config)) is not None:
        return
    family_from_config(config).check_stored_weights()
