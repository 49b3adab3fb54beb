"""Signs that other work used the machine while a profile was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from flowtrain.costs.profile import ImageTable, Profile

NOISE_SHARE = 0.1
"""A decrease of time with more work, up to this share of the time measured together with it, counts as noise."""

OWN_LOAD = 1.0
"""Load average of the measuring process itself, before it starts others."""

_WAY_OUT = "measure again on a machine that does nothing else"


def profile_warnings(profile: Profile, load_average: float | None) -> tuple[str, ...]:
    """Return the reasons to distrust a profile: other load on the machine, and times that fall while work grows.

    load_average: of the machine before anything was started; None if the devices are on another machine.
    """
    found = []
    if load_average is not None and load_average > OWN_LOAD:
        found.append(
            f"the load average was {load_average:.1f} before measuring began, and at most {OWN_LOAD:g} of that is "
            f"this command's own: {_WAY_OUT}"
        )
    return (*found, *_backbone(profile), *_encoders(profile))


def _backbone(profile: Profile) -> Iterator[str]:
    for tp in profile.layers:
        tables = {"a layer": profile.layers[tp], "the head": profile.heads[tp], "the connector": profile.connectors[tp]}
        # All three are differences of the same measured steps, so noise is a share of their sum.
        whole = [sum(times) for times in zip(*(table.seconds for table in tables.values()), strict=True)]
        for name, table in tables.items():
            if _falls(table.seconds, whole):
                group = f" (tp={tp})" if tp > 1 else ""
                yield _sentence(f"{name}{group}", table.seconds, table.num_tokens, "tokens")


def _encoders(profile: Profile) -> Iterator[str]:
    for name, by_degree in profile.encoders.items():
        for table in by_degree.values():
            yield from _images(name, table)


def _images(name: str, table: ImageTable) -> Iterator[str]:
    for size, row in zip(table.num_patches, table.seconds, strict=True):
        if _falls(row, row):
            yield _sentence(f"encoders.{name} with {size:,} patches an image", row, table.batch, "images")
    for batch, column in zip(table.batch, zip(*table.seconds, strict=True), strict=True):
        if _falls(column, column):
            yield _sentence(f"encoders.{name} with {batch:,} images", column, table.num_patches, "patches an image")


def _falls(seconds: Sequence[float], whole: Sequence[float]) -> bool:
    """Whether a time is below the previous one by more than noise; whole: the times measured together with each."""
    steps = zip(pairwise(seconds), pairwise(whole), strict=True)
    return any(before - after > NOISE_SHARE * max(wholes) for (before, after), wholes in steps)


def _sentence(what: str, seconds: Sequence[float], sizes: Sequence[int], unit: str) -> str:
    times, steps = (" / ".join(texts) for texts in ([f"{1e3 * each:.3g}" for each in seconds], map(str, sizes)))
    return f"{what} takes {times} ms with {steps} {unit}, though more work takes longer: {_WAY_OUT}"
