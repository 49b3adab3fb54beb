"""What each layer of a model costs a pipeline: time, bytes that are sent on, parameters; for cutting it into stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.costs.action_times import ActionTimes, StageWork
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchWork


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """Units of layers that a cut leaves whole, in the order in which a microbatch passes them; ``[U]`` each.

    A unit is one layer, except the first decoder layers where deepstack rows enter, which are one together.
    """

    sizes: IntArray
    """Layers of each."""
    seconds: FloatArray
    """Forward and backward of a microbatch. The first decoder layer has the connector in addition, the last one the
    head, and the first of all a whole encoder whose layers are not cut."""
    sent_s: FloatArray
    """Sending the output of each to the next rank, and its gradient back where there is one."""
    parameters: FloatArray
    """Of each, with embedding, connector and head."""

    def counts(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many layers stages have that hold so many units each."""
        ends = np.cumsum(units)
        return tuple(int(each.sum()) for each in np.split(self.sizes, ends[:-1]))


def layer_costs(
    times: ActionTimes, work: MicrobatchWork, *, encoder: str | None, is_cut: bool, trains: bool
) -> LayerCosts:
    """Return the costs of a microbatch's layers.

    encoder: its name in a pipeline that has it. is_cut: its layers are cut as the backbone's are; otherwise all of them
    are in the first stage. trains: it is trained.
    """
    model = times.times.model
    depth, first_layers = model.backbone.num_layers, model.backbone.first_layers
    one, both = (_seconds(times, StageWork(count, False, False), work) for count in (1, 2))
    layer = both - one  # without what each stage takes once
    head = _seconds(times, StageWork(1, False, True), work) - one
    connector = _seconds(times, StageWork(1, True, False), work) - one
    seconds = np.full(depth, layer)
    seconds[0] += connector
    seconds[-1] += head
    sent = np.full(depth, 2.0 * times.transfer_s(work))
    tp = times.degrees.tp
    parameters = np.full(depth, model.backbone.layer_parameters / tp)
    parameters[0] += (model.backbone.head_parameters + model.connector.num_parameters) / tp
    parameters[-1] += model.backbone.head_parameters / tp
    sizes = np.ones(depth, dtype=np.int64)
    if first_layers > 1:
        starts = np.array([0, *range(first_layers, depth)])
        sizes, seconds, parameters = (np.add.reduceat(each, starts) for each in (sizes, seconds, parameters))
        sent = sent[first_layers - 1 :]
    if encoder is None:
        return LayerCosts(sizes, seconds, sent, parameters)
    spec = model.encoders[encoder]
    whole = _seconds(times, StageWork(spec.num_layers, False, False, trains, encoder), work)
    if not is_cut:
        seconds[0] += whole
        parameters[0] += spec.num_layers * spec.layer_parameters / tp
        return LayerCosts(sizes, seconds, sent, parameters)
    ones = np.ones(spec.num_layers)
    return LayerCosts(
        np.concatenate([ones.astype(np.int64), sizes]),
        np.concatenate([whole / spec.num_layers * ones, seconds]),
        np.concatenate([(1.0 + trains) * times.rows_s(encoder, work) * ones, sent]),
        np.concatenate([spec.layer_parameters / tp * ones, parameters]),
    )


def _seconds(times: ActionTimes, stage: StageWork, work: MicrobatchWork) -> float:
    return times.forward_s(stage, work) + (times.backward_s(stage, work) if stage.has_backward else 0.0)
