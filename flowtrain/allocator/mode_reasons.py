"""Why a mode won or lost, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.types.run_plan import Mode

SIMPLER: tuple[Mode, ...] = ("decoupled", "colocated", "monolithic", "disaggregated")
"""Of modes that are as fast, the first one wins."""
AS_FAST = 0.995
"""Share of the best rate from which on a mode counts as fast: predictions are not more exact."""
CANNOT_RUN = "cannot run"
"""Begins the reason of a mode that no devices could run."""
NOTABLE = 0.02
"""Shares of time below this are not worth a word."""
_EQUAL = 0.0005


@dataclass(frozen=True, slots=True)
class Contestant:
    """A candidate of a mode with its rate by drawn batches, simulated or not."""

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
    shares: dict[str, float] = field(default_factory=dict)
    """Of the samples, those that need each encoder."""
    predicted: float | None = None
    """Samples/s without trials, by which ``rate`` is corrected; None: the same."""
    was_tried: bool = False
    """Whether a profile has a trial of it; ``rate`` then lies among the rates that trials of its work ran."""

    @property
    def mode(self) -> Mode:
        """The mode."""
        return self.candidate.mode


def rate_text(rate: float) -> str:
    """A rate with four digits that count, without an exponent."""
    return f"{float(f'{rate:.4g}'):,.15g}"


def simplicity(mode: Mode) -> int:
    """Place in the order of ``SIMPLER``."""
    return SIMPLER.index(mode) if mode in SIMPLER else len(SIMPLER)


def place(mode: Mode, rate: float) -> tuple[float, int]:
    """Sorts modes by rate in samples/s, the fastest first; equals, as they are printed, by simplicity."""
    return -float(f"{rate:.4g}"), simplicity(mode)


def why_won(winner: Contestant, others: Sequence[Contestant], *, is_alone: bool = False) -> str:
    """Return the reason of the winner. others: the fastest first. is_alone: no other mode was asked for."""
    if not others:
        return "; ".join((f"the only mode that {'was asked for' if is_alone else 'fits'}", *_costs(winner)))
    second = others[0]
    lead = winner.rate / second.rate - 1.0
    if _are_equal(second, winner):
        head = f"as fast as {second.mode}{_apart(second, winner)}, and simpler"
    else:
        head = f"the fastest, {100 * lead:.1f} % faster than {second.mode}"
    # Modes that are as fast are mostly the same plan with or without a barrier; the next one tells more.
    slower = next((each for each in others if winner.rate / each.rate - 1.0 >= NOTABLE), None)
    if _are_equal(second, winner) and slower is not None:
        head += f"; {100 * (winner.rate / slower.rate - 1.0):.1f} % faster than {slower.mode}"
    return "; ".join((head, *_costs(winner)))


def why_lost(loser: Contestant, winner: Contestant) -> str:
    """Return the reason of another one."""
    if _are_equal(loser, winner):
        return f"as fast as {winner.mode}{_apart(loser, winner)}, which is simpler"
    causes = "; ".join((*_costs(loser), *_differences(loser, winner)))
    return f"{100 * (1.0 - loser.rate / winner.rate):.1f} % slower than {winner.mode}" + (
        f": {causes}" if causes else ""
    )


def _are_equal(other: Contestant, winner: Contestant) -> bool:
    """Whether the tie rule decides between both: the winner is simpler, and no slower than predictions are exact."""
    slower, faster = sorted((other.rate, winner.rate))
    return slower >= AS_FAST * faster and simplicity(winner.mode) < simplicity(other.mode)


def _apart(other: Contestant, winner: Contestant) -> str:
    gap = abs(winner.rate / other.rate - 1.0)
    return f" ({100 * gap:.1f} % apart)" if gap >= _EQUAL else ""


def why_bound(bound: Contestant) -> str:
    """Return the reason of ``llm_only``."""
    return f"a bound, not a plan: the backbone alone on {bound.candidate.devices} devices, without images"


def _costs(contestant: Contestant) -> Iterator[str]:
    """What takes time from a mode."""
    candidate = contestant.candidate
    degrees = candidate.backbone.degrees
    if candidate.mode in ("decoupled", "disaggregated") and candidate.devices > 1:
        yield from _sides(contestant)
        if contestant.starved > NOTABLE:
            until = "features" if candidate.mode == "decoupled" else "all features of a step"
            yield f"it waits {contestant.starved:.1%} of its time for {until}"
    elif candidate.mode in ("decoupled", "disaggregated"):
        yield "encoders and backbone take turns on the only device"
    if candidate.mode == "colocated":
        known = "measured" if contestant.is_measured else "assumed"
        yield from _filled(contestant)
        yield f"encoder and backbone at once take {contestant.slowdown:.2f} times as long as both alone ({known})"
    if candidate.mode == "monolithic":
        where = f" by layers {_PLACES[candidate.encoder_layers or 'first']}" if degrees.pp > 1 else ""
        yield f"each replica encodes the images of its own microbatches{where}"
    yield from _trial(contestant)
    if contestant.imbalance > NOTABLE and degrees.dp > 1:
        yield f"its slowest replica computes {contestant.imbalance:.1%} more than the mean"


def _trial(contestant: Contestant) -> Iterator[str]:
    """What trials say."""
    predicted = contestant.predicted
    if predicted is None:
        return
    if contestant.was_tried:
        yield f"trials ran {rate_text(contestant.rate)} samples/s, {rate_text(predicted)} were predicted"
    elif predicted != contestant.rate:
        yield f"{rate_text(predicted)} samples/s are predicted, and corrected by how far trials of like plans were off"


def _sides(contestant: Contestant) -> Iterator[str]:
    """Which side sets the rate, and how much of the other is idle, by formula."""
    candidate, backbone = contestant.candidate, contestant.candidate.backbone
    encoders = candidate.devices - backbone.devices
    taken = backbone.rate
    given = min(each.rate / contestant.shares.get(name, 1.0) for name, each in candidate.encoders.items())
    idle = 1.0 - min(taken, given) / max(taken, given)
    if taken <= given:
        yield (
            f"its backbone's {_devices(backbone.devices)} can take {rate_text(taken)} samples/s and set the rate; the "
            f"encoders' {_devices(encoders)} could give {rate_text(given)} and idle {idle:.1%} of their time"
        )
    else:
        yield (
            f"its encoders' {_devices(encoders)} can give {rate_text(given)} samples/s and set the rate; the "
            f"backbone's {_devices(backbone.devices)} could take {rate_text(taken)}"
        )


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _filled(contestant: Contestant) -> Iterator[str]:
    """What the work of encoders costs beside the backbone."""
    candidate = contestant.candidate
    where = "its only device does" if candidate.devices == 1 else f"all {candidate.devices} devices share"
    cost = max(0.0, 1.0 - candidate.rate_formula / candidate.backbone.rate)
    if cost < NOTABLE and candidate.backbone.degrees.pp == 1:
        yield f"{where} the vision work, which by formula fits into waits of the backbone"
    else:
        yield f"{where} the vision work, which by formula costs {cost:.1%} of the backbone's own rate"
    drawn = contestant.rate if contestant.predicted is None else contestant.predicted
    if (lost := 1.0 - drawn / candidate.rate_formula) > NOTABLE:
        yield f"packed batches are {lost:.1%} slower than the formula"


def _differences(loser: Contestant, winner: Contestant) -> Iterator[str]:
    """What the backbone of a mode with encoders on the same devices has otherwise than the winner's."""
    if loser.mode not in ("monolithic", "colocated"):
        return
    mine, others = _backbone_words(loser.candidate), _backbone_words(winner.candidate)
    unlike = [key for key in mine if key in others and mine[key] != others[key]]
    if unlike:
        texts = [", ".join(f"{key} {words[key]}" for key in unlike) for words in (mine, others)]
        yield f"its backbone has {texts[0]}, that of {winner.mode} {texts[1]}"


def _backbone_words(candidate: ModeCandidate) -> dict[str, str]:
    degrees, settings = candidate.backbone.degrees, candidate.settings
    words = {"pp": str(degrees.pp), "tp": str(degrees.tp)}
    if settings is not None and settings.activation_checkpointing is not None:
        words["checkpointing"] = settings.activation_checkpointing
    return words


_PLACES = {"first": "in the first stage", "mixed": "in stages with the backbone's", "own": "in stages of their own"}
