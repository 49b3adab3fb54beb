"""Why a mode won or lost: what limits it, and ties."""

from __future__ import annotations

import pytest

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.mode_reasons import Contestant, rate_text, why_lost, why_won
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings, Mode


def candidate(module: str, rate: float, degrees: Degrees) -> Candidate:
    return Candidate(module=module, device_type="h200", degrees=degrees, rate=rate)


def contestant(
    mode: Mode,
    rate: float = 100.0,
    *,
    backbone: float = 100.0,
    encoder: float = 125.0,
    pp: int = 1,
    tp: int = 1,
    imbalance: float = 0.0,
    words: str = "none",
) -> Contestant:
    dp = 8 // pp // tp
    has_actors = mode in ("decoupled", "disaggregated")
    found = ModeCandidate(
        mode,
        candidate("backbone", backbone, Degrees(dp, pp, tp)),
        {"vision": candidate("vision", encoder, Degrees(2, 1, 1))} if mode != "monolithic" else {},
        BackboneSettings(1024, words, 1, None),  # type: ignore[arg-type]
        rate_formula=min(rate, backbone),
        devices=10 if has_actors else 8,
    )
    return Contestant(found, rate, imbalance, 0.0, 1.05, False, {"vision": 0.5})


def test_the_side_that_sets_the_rate_is_named() -> None:
    winner = contestant("colocated", 120.0)
    assert why_lost(contestant("decoupled", 98.0), winner) == (
        "18.3 % slower than colocated: its backbone's 8 devices can take 100 samples/s and set the rate; the encoders' "
        "2 devices could give 250 and idle 60.0% of their time"
    )
    starving = why_lost(contestant("decoupled", 40.0, encoder=25.0), winner)
    assert "its encoders' 2 devices can give 50 samples/s and set the rate" in starving and "idle" not in starving


def test_a_loser_of_the_same_devices_says_what_it_has_otherwise() -> None:
    winner = contestant("colocated", 120.0, pp=2)
    reason = why_lost(contestant("monolithic", 100.0, tp=2, imbalance=0.04, words="full"), winner)
    assert "its slowest replica computes 4.0% more than the mean" in reason
    assert reason.endswith(
        "its backbone has pp 1, tp 2, checkpointing full, that of colocated pp 2, tp 1, checkpointing none"
    )


@pytest.mark.parametrize(
    ("pp", "backbone", "text"),
    [
        (1, 120.0, "the vision work, which by formula fits into waits of the backbone"),
        (2, 121.0, "the vision work, which by formula costs 0.8% of the backbone's own rate"),
        (2, 150.0, "all 8 devices share the vision work, which by formula costs 20.0% of the backbone's own rate"),
        (1, 150.0, "which by formula costs 20.0% of the backbone's own rate"),
    ],
)
def test_colocated_says_what_vision_costs(pp: int, backbone: float, text: str) -> None:
    assert text in why_won(contestant("colocated", 120.0, pp=pp, backbone=backbone), [contestant("decoupled")])


def test_ties_are_visible() -> None:
    second = contestant("colocated", 100.2)
    simple = contestant("decoupled", 100.0)
    assert why_won(simple, [second]).startswith("as fast as colocated (0.2 % apart), and simpler")
    assert why_lost(second, simple) == "as fast as decoupled (0.2 % apart), which is simpler"
    assert why_lost(contestant("colocated"), simple) == "as fast as decoupled, which is simpler"
    assert why_won(contestant("decoupled", 101.0), [second]).startswith("the fastest, 0.8 % faster than colocated")
    # A simpler one that is close to the winner, but not to the fastest, has lost.
    assert why_lost(contestant("decoupled", 99.4), contestant("colocated", 99.8)).startswith("0.4 % slower")


def test_the_only_one_was_asked_for_or_fits() -> None:
    alone = contestant("monolithic")
    assert why_won(alone, [], is_alone=True).startswith("the only mode that was asked for; ")
    assert why_won(alone, []).startswith("the only mode that fits; ")


def test_rates_have_four_digits_that_count_and_no_exponent() -> None:
    rates = (0.012345, 6.0, 54.712, 2193.4, 36_264.9, 1.2e6)
    assert [rate_text(rate) for rate in rates] == ["0.01235", "6", "54.71", "2,193", "36,260", "1,200,000"]
