"""Figures of the benchmark of modes."""

from __future__ import annotations

from statistics import median

from _modes_runs import Measured, Variant
from _report import Figure, at_least

Rounds = dict[str, list[Measured]]
"""Runs of each variant, one a round."""


def span(values: list[float]) -> str:
    """Lowest and highest of the rounds."""
    return f"{min(values):.4g} to {max(values):.4g} in {len(values)} rounds"


def figures_of(label: str, found: Rounds, best: dict[str, tuple[str, ...]], origin: str) -> list[Figure]:
    """What each variant did."""
    figures = []
    for name, runs in found.items():
        steps = len(runs[0].tokens)
        busy = {role: median(run.busy_s.get(role, 0.0) for run in runs) / steps for role in sorted(runs[0].busy_s)}
        rates = [run.tokens_per_s for run in runs]
        note = ", ".join([span(rates), origin, *best.get(name, ())])
        memory = median(run.peak_nbytes for run in runs) / 2**20
        of_roles = ", ".join(f"{role} {1e3 * seconds:.0f}" for role, seconds in busy.items())
        figures += [
            Figure(f"{label}.{name}.tokens_per_s", median(rates), "tokens/s", note=note),
            Figure(f"{label}.{name}.starved_share", median(run.starved_share for run in runs), "1"),
            Figure(f"{label}.{name}.copied", median(run.copied for run in runs) / steps / 1e6, "MB/step"),
            Figure(f"{label}.{name}.peak_memory", memory, "MiB", note="all actors"),
            Figure(f"{label}.{name}.processor", 1e3 * sum(busy.values()), "ms/step", note=of_roles),
        ]
    return figures


def ratios_of(label: str, found: Rounds, variants: list[Variant]) -> list[Figure]:
    """Rates over each other, paired by round."""

    def paired(over: str, under: str) -> list[float]:
        pairs = zip(found.get(over, ()), found.get(under, ()), strict=False)
        return [one.tokens_per_s / other.tokens_per_s for one, other in pairs]

    figures = []
    for over, under, target in (
        ("decoupled", "disaggregated", 1.0),
        ("colocated", "monolithic_dp2", 1.0),
        ("decoupled", "llm_only", 0.97),
    ):
        if ratios := paired(over, under):
            note = span(ratios)
            if under == "llm_only":
                starved = median(run.starved_share for run in found[over])
                note += f"; one backbone device each; the backbone starves {starved:.3f} of the time"
            figures.append(at_least(f"{label}.{over}_over_{under}", median(ratios), "1", target, note))
    for variant in variants:
        base = "allocated_milp" if variant.name.startswith("allocated_") else variant.ablation_of
        bases = [name for name in found if base is not None and name.startswith(base)]
        if base is not None and variant.name not in bases and bases and (ratios := paired(variant.name, bases[0])):
            note = ", ".join([span(ratios), *variant.overrides])
            figures.append(Figure(f"{label}.{variant.name}_over_{base}", median(ratios), "1", note=note))
    return figures
