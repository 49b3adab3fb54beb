"""What several devices measured at once, as one value of each kind: the slowest device, the means of the times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowtrain.costs.profile import DeviceFacts
from flowtrain.types.profile import BackboneTimes, DeviceReport, EncoderTimes, LayerTimes, LossTimes, ReplicaSteps


def slowest_facts(devices: Sequence[DeviceReport], devices_per_node: int) -> DeviceFacts:
    """Return the facts of the slowest device."""
    slowest = min(devices, key=lambda device: device.flops)
    return DeviceFacts(
        flops=slowest.flops,
        memory_nbytes=slowest.memory_nbytes,
        bandwidth=slowest.bandwidth,
        link=slowest.link,
        devices_per_node=devices_per_node,
    )


def mean_backbone(times: Sequence[BackboneTimes]) -> BackboneTimes:
    """Return the means of the backbone's times."""

    def each(name: str) -> tuple[float, ...]:
        return tuple(np.mean([getattr(one, name) for one in times], axis=0).tolist())

    def mean(name: str) -> float:
        return statistics.mean(getattr(one, name) for one in times)

    def mean_share(name: str, of: str) -> float:
        whole = sum(getattr(one, of) for one in times)
        return sum(getattr(one, name) * getattr(one, of) for one in times) / whole if whole > 0.0 else mean(name)

    return BackboneTimes(
        layers_s=each("layers_s"),
        heads_s=each("heads_s"),
        connectors_s=each("connectors_s"),
        assembling_s=mean("assembling_s"),
        step_s=mean("step_s"),
        parameter_s=mean("parameter_s"),
        embeddings_s=each("embeddings_s"),
        ends_s=mean("ends_s"),
        ends_parameter_s=mean("ends_parameter_s"),
        ends_forward_share=mean_share("ends_forward_share", "ends_s"),
        first_backward_parameter_s=mean("first_backward_parameter_s"),
        square_s=mean("square_s"),
        squares=times[0].squares,
        ragged_s=mean("ragged_s"),
        ragged=times[0].ragged,
        losses=_mean_losses([one.losses for one in times]),
        targets=times[0].targets,
        vision_tokens=times[0].vision_tokens,
        strategies=_mean_layers([one.strategies for one in times]),
        forward_share=mean("forward_share"),
        head_forward_share=mean("head_forward_share"),
        pass_s=mean("pass_s"),
        pass_forward_share=mean_share("pass_forward_share", "pass_s"),
    )


def _mean_losses(found: Sequence[LossTimes]) -> LossTimes:
    """Return the means over devices; a share counts by the time that it is of."""
    seconds = np.mean([one.seconds for one in found], axis=0).tolist()
    whole = sum(one.seconds[-1] for one in found)
    forward = sum(one.forward_share * one.seconds[-1] for one in found)
    return replace(found[0], seconds=tuple(seconds), forward_share=forward / whole if whole > 0.0 else 0.0)


def _mean_layers(found: Sequence[Mapping[str, LayerTimes]]) -> dict[str, LayerTimes]:
    """Return the means of a layer's times by memory strategy."""
    return {
        word: LayerTimes(
            first.num_tokens,
            statistics.mean(each[word].seconds for each in found),
            statistics.mean(each[word].kept_nbytes for each in found),
        )
        for word, first in found[0].items()
    }


def mean_steps(steps: Sequence[ReplicaSteps]) -> ReplicaSteps:
    """Return the means of the steps' times."""
    names = ("microbatch_s", "beside_s", "first_s", "last_s", "first_backward_s")
    means = {name: np.mean([getattr(one, name) for one in steps], axis=0).tolist() for name in names}
    return replace(steps[0], **{name: (shallow, deep) for name, (shallow, deep) in means.items()})


def mean_encoder(times: Sequence[EncoderTimes]) -> EncoderTimes:
    """Return the means of an encoder's times."""
    seconds = np.mean([one.seconds for one in times], axis=0).tolist()
    return replace(
        times[0],
        seconds=tuple(tuple(row) for row in seconds),
        decode_s=statistics.mean(one.decode_s for one in times),
        strategies=_mean_layers([one.strategies for one in times]),
    )
