"""The modes of a run side by side: the best plan of each, its rate, and why it won or lost."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.allocator.allocation import Allocation, ModuleAllocation
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.costs.profile_trials import TriedPlan
from flowtrain.types.run_plan import BackboneSettings, EncoderPlace, Mode


@dataclass(frozen=True, slots=True)
class ModeRating:
    """The best plan of one mode."""

    mode: Mode
    rate: float | None
    """Samples/s of the run; None if nothing of this mode fits the devices."""
    reason: str
    """Why it won, lost or does not fit, in words."""
    modules: tuple[ModuleAllocation, ...] = ()
    """Encoders, then the backbone; in ``monolithic`` the backbone alone. Empty if nothing fits."""
    devices: int = 0
    """Number of devices in use."""
    settings: BackboneSettings | None = None
    encoder_layers: EncoderPlace | None = None
    """In ``monolithic``: where the encoder's layers lie."""
    rate_formula: float | None = None
    """Samples/s by the surrogate alone; ``rate`` is simulated, or with a profile that of packed batches."""
    imbalance: float = 0.0
    """Time of a step's slowest replica over the mean, minus one."""
    predicted: float | None = None
    """Samples/s without the profile's trials; ``rate`` is corrected by them."""
    candidate: ModeCandidate | None = None
    """What was rated; None if nothing fits."""
    was_tried: bool = False
    """Whether the profile has a trial of it; ``rate`` then lies among the rates that trials of its work ran."""

    @property
    def plan(self) -> TriedPlan | None:
        """What a trial of it is known by; None if nothing fits."""
        return self.candidate.plan if self.candidate is not None else None


@dataclass(frozen=True, slots=True)
class ModeComparison:
    """All modes under one memory and rate model."""

    ratings: tuple[ModeRating, ...]
    """The winner, the others from the fastest on, ``llm_only`` as a bound, those that do not fit."""
    allocation: Allocation | None
    """The optimum of Eq. 2 for ``decoupled``, with its alternatives and its curve; None if nothing fits."""
    seconds: float
    """Of the whole comparison."""

    @property
    def winner(self) -> ModeRating:
        """The fastest, or a simpler one that is as fast."""
        return self.ratings[0]
