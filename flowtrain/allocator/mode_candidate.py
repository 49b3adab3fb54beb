"""One configuration of a whole run in one mode, before and after its rate by drawn batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.allocator.candidates import Candidate
from flowtrain.costs.profile_trials import TriedPlan
from flowtrain.types.run_plan import BackboneSettings, EncoderPlace, Mode


@dataclass(frozen=True, slots=True)
class ModeCandidate:
    """A choice of degrees and settings that fits the devices."""

    mode: Mode
    backbone: Candidate
    """Its ``rate`` is that of the backbone alone; in ``monolithic`` that of the ranks with the encoder."""
    encoders: dict[str, Candidate] = field(default_factory=dict)
    """By encoder's name. In ``colocated`` an actor on each device of the backbone, as in the plan; none in
    ``monolithic`` and ``llm_only``."""
    settings: BackboneSettings | None = None
    """None: as configured."""
    encoder_layers: EncoderPlace | None = None
    """In ``monolithic``: where the encoder's layers lie."""
    rate_formula: float = float("nan")
    """Samples/s of the run by the surrogate alone."""
    devices: int = 0
    """Number of devices in use."""

    @property
    def plan(self) -> TriedPlan:
        """What a trial of it is known by."""
        encoders = {name: each.degrees for name, each in self.encoders.items()}
        return TriedPlan(self.mode, self.backbone.degrees, encoders, self.settings, self.encoder_layers)
