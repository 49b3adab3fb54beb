"""Why a mode won or lost, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.types.run_plan import Mode

_NOTABLE = 0.02
"""Shares of time below this are not worth a word."""
_EQUAL = 0.0005


@dataclass(frozen=True, slots=True)
class Contestant:
    """The best candidate of a mode with its rate by drawn batches."""

    candidate: ModeCandidate
    rate: float
    """Samples/s."""
    imbalance: float
    """Time of the slowest replica over the mean, minus one."""
    starved: float
    """Share of its time that the backbone waits for encoders."""
    slowdown: float
    """Time of encoder and backbone at once on a device over the sum of both alone."""
    is_measured: bool
    """Whether a profile has measured ``slowdown``."""

    @property
    def mode(self) -> Mode:
        """The mode."""
        return self.candidate.mode


def why_won(winner: Contestant, others: Sequence[Contestant]) -> str:
    """Return the reason of the winner."""
    if not others:
        return "; ".join(("the only mode that was asked for or fits", *_costs(winner)))
    second = others[0]
    lead = winner.rate / second.rate - 1.0
    if lead < 0.0:
        head = f"as fast as {second.mode} within {-100 * lead:.1f} %, and simpler"
    elif lead < _EQUAL:
        head = f"as fast as {second.mode}, and simpler"
    else:
        head = f"the fastest, {100 * lead:.1f} % faster than {second.mode}"
    # Modes that are as fast are mostly the same plan with or without a barrier; the next one tells more.
    slower = next((each for each in others if winner.rate / each.rate - 1.0 >= _NOTABLE), None)
    if lead < _EQUAL and slower is not None:
        head += f"; {100 * (winner.rate / slower.rate - 1.0):.1f} % faster than {slower.mode}"
    return "; ".join((head, *_costs(winner)))


def why_lost(loser: Contestant, winner: Contestant) -> str:
    """Return the reason of another one."""
    share = 1.0 - loser.rate / winner.rate
    if share < _EQUAL:
        return f"as fast as {winner.mode}, which is simpler"
    causes = "; ".join(_costs(loser))
    return f"{100 * share:.1f} % slower than {winner.mode}" + (f": {causes}" if causes else "")


def why_bound(bound: Contestant) -> str:
    """Return the reason of ``llm_only``."""
    return f"a bound, not a plan: the backbone alone on {bound.candidate.devices} devices, without images"


def _costs(contestant: Contestant) -> Iterator[str]:
    """What takes time from a mode."""
    candidate = contestant.candidate
    degrees = candidate.backbone.degrees
    if candidate.mode in ("decoupled", "disaggregated") and candidate.devices > 1:
        encoders = candidate.devices - candidate.backbone.devices
        devices = "1 device" if candidate.backbone.devices == 1 else f"{candidate.backbone.devices} devices"
        yield f"the backbone has {devices}, encoders have {encoders}"
        if contestant.starved > _NOTABLE:
            until = "features" if candidate.mode == "decoupled" else "all features of a step"
            yield f"it waits {contestant.starved:.1%} of its time for {until}"
    elif candidate.mode in ("decoupled", "disaggregated"):
        yield "encoders and backbone take turns on the only device"
    if candidate.mode == "colocated":
        known = "measured" if contestant.is_measured else "assumed"
        yield f"encoder and backbone at once take {contestant.slowdown:.2f} times as long as both alone ({known})"
    if candidate.mode == "monolithic":
        where = f" by layers {_PLACES[candidate.encoder_layers or 'first']}" if degrees.pp > 1 else ""
        yield f"each replica encodes the images of its own microbatches{where}"
    if contestant.imbalance > _NOTABLE and degrees.dp > 1:
        yield f"its slowest replica computes {contestant.imbalance:.1%} more than the mean"


_PLACES = {"first": "in the first stage", "mixed": "in stages with the backbone's", "own": "in stages of their own"}
