"""Looks at what training steps take of the device's memory, and recomputes more where the prediction was too low."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from flowtrain.pipeline.actions import StageMemory, StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.recompute import RankRecomputation, stepped_up
from flowtrain.training.mesh import TP_AXIS, BackboneGroup

logger = logging.getLogger(__name__)

_GIB = 2**30


class MemoryGuard:
    """Steps a rank's recomputation up by what its last step took too much (OmniBal 4.3, the end of step 4).

    Every step is a trial. The usable memory leaves a margin to the device's, within which a step is over the limit and
    still runs. Tensor parallel groups decide by themselves: what they recompute changes no result and no transfer.

    stages: the rank's, in the order of the flow: module, index, number of layers.
    saved_nbytes: what recomputing one more layer of a module saves.
    peak_nbytes: returns the most memory since it was last called.
    """

    def __init__(
        self,
        stages: Sequence[tuple[StageModule, int, int]],
        saved_nbytes: Mapping[StageModule, int],
        usable_nbytes: int,
        peak_nbytes: Callable[[], int],
    ) -> None:
        self._stages, self._saved_nbytes = tuple(stages), dict(saved_nbytes)
        self._usable_nbytes, self._peak_nbytes = usable_nbytes, peak_nbytes
        self._has_told = False

    @classmethod
    def of(cls, partition: Partition, chosen: RankRecomputation, group: BackboneGroup) -> MemoryGuard:
        """Build the guard of a rank on an accelerator; ranks of a tensor parallel group call it together."""
        own = partition.of_rank(group.pp_rank)
        stages = [(each.module, each.index, len(each.layers)) for each in own if each.has_backward]
        _taken_peak_nbytes(group)  # building the model is no step
        return cls(stages, chosen.saved_nbytes, chosen.usable_nbytes, lambda: _taken_peak_nbytes(group))

    def after_step(
        self, memory: Mapping[tuple[StageModule, int], StageMemory]
    ) -> dict[tuple[StageModule, int], StageMemory] | None:
        """Return the strategies for the next step if the last one took too much, else None.

        memory: of every stage.
        """
        peak = self._peak_nbytes()
        if peak <= self._usable_nbytes:
            return None
        taken = f"a step took {peak / _GIB:.2f} GiB of device memory, and {self._usable_nbytes / _GIB:.2f} are usable"
        changed = stepped_up(memory, self._stages, self._saved_nbytes, peak - self._usable_nbytes)
        if changed is not None:
            now = ", ".join(f"{module} {changed[module, index]}" for module, index, _ in self._stages)
            logger.warning("%s; from the next step on this rank recomputes more: %s", taken, now)
        elif not self._has_told:
            self._has_told = True
            logger.warning("%s; all layers are recomputed already: lower scheduler.microbatch_tokens", taken)
        return changed


def _taken_peak_nbytes(group: BackboneGroup) -> int:
    """The most memory since the last call, on the fullest rank of the tensor parallel group, which all do alike."""
    backend = torch.get_device_module(group.device)
    peak = torch.tensor([backend.max_memory_allocated(group.device)], device=group.device)
    backend.reset_peak_memory_stats(group.device)
    if group.degrees.tp > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group.mesh[TP_AXIS].get_group())
    return int(peak)
