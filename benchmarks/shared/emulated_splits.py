"""All ways to split emulated devices between encoders and backbone, and the choice of those that are run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.request import Request, enumerate_module
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.types.plan import Degrees


@dataclass(frozen=True, slots=True)
class Split:
    """Degrees of the encoder and of the backbone; production, consumption: predicted samples/s of the whole data."""

    encoder: Degrees
    backbone: Degrees
    production: float
    consumption: float

    @property
    def rate(self) -> float:
        """Predicted samples/s."""
        return min(self.production, self.consumption)

    @property
    def num_devices(self) -> int:
        """Number of emulated devices that the split uses."""
        return self.encoder.world_size + self.backbone.world_size

    @property
    def key(self) -> tuple[Degrees, Degrees]:
        """The degrees, which identify the split."""
        return self.encoder, self.backbone

    def __str__(self) -> str:
        encoder, backbone = self.encoder, self.backbone
        tensor = f"xtp{encoder.tp}" if encoder.tp > 1 else ""
        return f"encoder {encoder.dp}{tensor} | backbone dp{backbone.dp} pp{backbone.pp} tp{backbone.tp}"


def all_splits(request: Request, surrogate: Surrogate, encoder: str) -> list[Split]:
    """Return every feasible pair of configurations that uses all devices."""
    (device,) = request.cluster.device_types
    found = {name: enumerate_module(request, name, device).columns for name in (encoder, BACKBONE)}
    rates = {name: surrogate.rates(columns) for name, columns in found.items()}
    by_devices: dict[str, dict[int, list[tuple[Degrees, float]]]] = {}
    for name, columns in found.items():
        lists = by_devices.setdefault(name, defaultdict(list))
        for index, rate in enumerate(rates[name].tolist()):
            degrees = columns.candidate(index, rate).degrees
            lists[degrees.world_size].append((degrees, rate))
    share = request.workload.share(encoder)
    return [
        Split(encoder_degrees, degrees, made / share, consumed)
        for count, encoders in sorted(by_devices[encoder].items())
        for encoder_degrees, made in encoders
        for degrees, consumed in by_devices[BACKBONE].get(device.count - count, [])
    ]


def worth_trying(splits: Iterable[Split], limit: int, least_rate: float) -> list[Split]:
    """Return, for each number of encoder devices, the ``limit`` splits that are predicted to be fastest.

    In addition, all splits that are predicted to reach ``least_rate``. Of two with equal prediction, the one whose
    faster side is faster comes first.
    """
    groups: dict[int, list[Split]] = defaultdict(list)
    for split in splits:
        groups[split.encoder.world_size].append(split)
    order = {count: sorted(group, key=_worth, reverse=True) for count, group in sorted(groups.items())}
    return [
        split
        for group in order.values()
        for place, split in enumerate(group)
        if place < limit or split.rate >= least_rate
    ]


def planned_split(allocation: Allocation, splits: Sequence[Split], encoder: str) -> Split:
    """Return the plan as a split; a plan that leaves devices free is not in ``splits``."""
    chosen = {module.name: module for module in allocation.modules}
    mine = Split(chosen[encoder].degrees, chosen[BACKBONE].degrees, chosen[encoder].production, chosen[BACKBONE].rate)
    return next((split for split in splits if split.key == mine.key), mine)


def _worth(split: Split) -> tuple[float, float]:
    return split.rate, max(split.production, split.consumption)
