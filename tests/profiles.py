"""A profile of a run that nobody measured, for plans on CPUs."""

from __future__ import annotations

from pathlib import Path

from flowtrain.config.run import RunConfig
from flowtrain.costs.profile import (
    DeviceFacts,
    ImageCosts,
    ImageTable,
    LengthTable,
    Profile,
    StepCosts,
    library_versions,
    model_facts,
)
from flowtrain.models.families.registry import family_from_config


def cpu_profile(config: RunConfig, image_s: float = 1e-3, layer_s: float = 1e-5) -> Profile:
    """Return one with ``image_s`` for each image, and ``layer_s`` a token in each layer of the backbone."""
    most = config.scheduler.microbatch_tokens
    lengths = tuple(max(1, most // part) for part in (4, 2, 1))
    per_token = LengthTable(lengths, tuple(layer_s * length for length in lengths))
    little = LengthTable(lengths, (1e-5,) * len(lengths))
    return Profile(
        device="cpu",
        facts=DeviceFacts(1e10, 8 << 30, 1e10, 1e9, 8),
        model=model_facts(config, family_from_config(config).model_spec),
        versions=library_versions(),
        layers={1: per_token},
        heads={1: per_token},
        connectors={1: little},
        encoders={name: {1: ImageTable((1, 4096), (1,), ((image_s,), (image_s,)))} for name in config.encoders},
        images={name: ImageCosts(decode_s=1e-4, batch_s=1e-4) for name in config.encoders},
        steps=StepCosts(step_s=1e-3, microbatch_s=1e-4, parameter_s=1e-9),
    )


def write_cpu_profile(path: Path, config: RunConfig, image_s: float = 1e-3, layer_s: float = 1e-5) -> Path:
    """Write one; arguments as for ``cpu_profile``."""
    path.write_text(cpu_profile(config, image_s, layer_s).to_json())
    return path
