"""Figures of ``end_to_end.py``: rates of all contestants, and whether ``auto`` is what it is to be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from statistics import median

from _end_to_end_auto import AUTO, Predicted
from _end_to_end_contest import BLIND, LOSS_TOLERANCE, WrongResult, words_of
from _end_to_end_peers import PEERS
from _end_to_end_store import Record, Setting
from _modes_runs import VARIANTS
from _report import Figure, at_least, at_most

Rounds = dict[str, dict[int, Record]]
"""Runs by contestant and round."""
AUTO_SHARE = 0.97
"""Of the best mode's rate, which ``auto`` must reach."""
APART = 0.05
"""Modes whose rates differ by more must have the predicted order."""
ABLATIONS = {each.name: each.ablation_of for each in VARIANTS if each.ablation_of is not None}


def rates(runs: dict[int, Record]) -> list[float]:
    """Tokens/s of the rounds."""
    return [record.tokens_per_s for record in runs.values()]


def span(values: Iterable[float]) -> str:
    """Lowest, highest and number of the rounds."""
    found = list(values)
    return f"{min(found):.4g} to {max(found):.4g} in {len(found)} rounds"


def is_ablation(name: str) -> bool:
    """Whether a contestant lacks a part of FlowTrain; of the allocations only the optimum lacks none."""
    return name in ABLATIONS or (name.startswith("allocated_") and "milp" not in name)


def modes_of(found: Rounds) -> list[str]:
    """FlowTrain's own contestants that train the whole model: no ablations, no bound, and not ``auto``."""
    return [name for name in found if name not in PEERS and name not in (BLIND, AUTO) and not is_ablation(name)]


def paired(found: Rounds, over: str, under: str) -> list[float]:
    """Ratios of two contestants' rates, by round."""
    return [
        record.tokens_per_s / found[under][number].tokens_per_s
        for number, record in found[over].items()
        if number in found[under]
    ]


def figures_of(setting: Setting, found: Rounds, predicted: Predicted | None, stand_ins: dict[str, str]) -> list[Figure]:
    """All figures of one setting."""
    label = setting.label
    figures = [
        Figure(
            f"{label}.{name}.tokens_per_s",
            median(rates(runs)),
            "tokens/s",
            note=f"{span(rates(runs))}; {next(iter(runs.values())).how}",
        )
        for name, runs in found.items()
    ]
    figures.append(_losses(label, found))
    if AUTO in found:
        figures += _auto(label, found)
    if predicted is not None:
        figures += _order(label, found, predicted, stand_ins)
    return figures + _ablations(label, found)


def _losses(label: str, found: Rounds) -> Figure:
    losses = {
        f"{name}, round {number + 1}": run.first_loss for name, runs in found.items() for number, run in runs.items()
    }
    seen = {name: loss for name, loss in losses.items() if loss is not None}
    if not seen:
        return Figure(f"{label}.first_losses_apart", 0.0, "1", note="no run that sees images")
    low, high = min(seen, key=seen.__getitem__), max(seen, key=seen.__getitem__)
    apart = seen[high] / seen[low] - 1.0
    if apart > LOSS_TOLERANCE:
        raise WrongResult(f"{label}: the first loss is {seen[low]} in {low} and {seen[high]} in {high}")
    return at_most(f"{label}.first_losses_apart", apart, "1", LOSS_TOLERANCE, f"{len(seen)} runs, {low} to {high}")


def _auto(label: str, found: Rounds) -> list[Figure]:
    figures = []
    others = [name for name in modes_of(found) if paired(found, AUTO, name)]
    if others:
        best = max(others, key=lambda name: median(rates(found[name])))
        ratios = paired(found, AUTO, best)
        note = f"{best}; {span(ratios)}"
        figures.append(at_least(f"{label}.auto_over_best_mode", median(ratios), "1", AUTO_SHARE, note))
    for name in PEERS:
        if name in found and (ratios := paired(found, AUTO, name)):
            figures.append(at_least(f"{label}.auto_over_{name}", median(ratios), "1", 1.0, span(ratios)))
    if BLIND in found and (ratios := paired(found, AUTO, BLIND)):
        figures.append(Figure(f"{label}.auto_over_{BLIND}", median(ratios), "1", note=span(ratios)))
    return figures


def _order(label: str, found: Rounds, predicted: Predicted, stand_ins: dict[str, str]) -> list[Figure]:
    """Predicted rates beside measured ones, and the share of pairs of modes that have the predicted order."""
    figures = [
        Figure(
            f"{label}.planned.{mode}", rate, "samples/s", note=f"{stand_ins[mode]}: {words_of(predicted.plans[mode])}"
        )
        for mode, rate in predicted.rates.items()
    ]
    right, wrong, close = 0, [], 0
    for one, other in combinations((mode for mode in predicted.rates if stand_ins[mode] in found), 2):
        if not (ratios := paired(found, stand_ins[one], stand_ins[other])):
            continue
        measured, expected = median(ratios), predicted.rates[one] / predicted.rates[other]
        if max(measured, 1 / measured) <= 1 + APART:
            close += 1
        elif (measured > 1) == (expected > 1):
            right += 1
        else:
            wrong.append(
                f"{one} over {other} is {measured:.3f}, not {predicted.rates[one] / predicted.rates[other]:.3f}"
            )
    if right or wrong:
        note = "; ".join([f"of {right + len(wrong)} pairs that differ, {close} do not", *wrong])
        figures.append(at_least(f"{label}.order_as_predicted", right / (right + len(wrong)), "1", 1.0, note))
    return figures


def _ablations(label: str, found: Rounds) -> list[Figure]:
    figures = []
    for name in found:
        if not is_ablation(name):
            continue
        base = ABLATIONS.get(name) or next((each for each in found if each.startswith("allocated_milp")), None)
        if base in found and (ratios := paired(found, name, base)):
            figures.append(Figure(f"{label}.{name}_over_{base}", median(ratios), "1", note=span(ratios)))
    return figures
