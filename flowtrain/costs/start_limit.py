"""How long a start may take, by the model's size. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.config.flow import START_BASE_S
from flowtrain.costs.model_spec import ModelSpec

SLOW_DISK = 200e6
"""Bytes/s of a slow disk, or of a node's share of a busy file system."""
FIRST_NBYTES = 4
"""Bytes of a parameter in the widest weight files."""
RESUMED_NBYTES = 12
"""Bytes of a parameter in a checkpoint: itself and AdamW's two moments, in float32."""


@dataclass(frozen=True, slots=True)
class StartLimit:
    """What ``limits.start_timeout_s`` is for a run."""

    seconds: float
    nbytes: int | None
    """Bytes that a node may have to read, all by itself; None: the key is set, so they do not matter."""

    @property
    def text(self) -> str:
        """The seconds and where they come from."""
        if self.nbytes is None:
            return f"{self.seconds:g} s, as limits.start_timeout_s says"
        return (
            f"{self.seconds:.0f} s (limits.start_timeout_s is not set: {START_BASE_S:g} s, and {self.nbytes / 1e9:.3g} "
            f"GB of state at {SLOW_DISK / 1e6:g} MB/s)"
        )


def start_limit(configured_s: float | None, model: ModelSpec, resumes: bool) -> StartLimit:
    """Return the limit of a start. configured_s: ``limits.start_timeout_s``. resumes: from a checkpoint."""
    if configured_s is not None:
        return StartLimit(configured_s, None)
    backbone = model.backbone.num_parameters + model.connector.num_parameters
    encoders = sum(encoder.num_parameters for encoder in model.encoders.values())
    nbytes = backbone * (RESUMED_NBYTES if resumes else FIRST_NBYTES) + encoders * FIRST_NBYTES
    return StartLimit(START_BASE_S + nbytes / SLOW_DISK, nbytes)
