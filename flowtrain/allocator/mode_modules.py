"""The modules of a mode's candidate, as an allocation has them."""

from __future__ import annotations

from flowtrain.allocator import monolithic
from flowtrain.allocator.allocation import ModuleAllocation
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Request, SurrogateFactory
from flowtrain.allocator.surrogate import BACKBONE, blocked_share
from flowtrain.costs.memory import StepMemory


def modules_of(
    request: Request, surrogate_for: SurrogateFactory, candidate: ModeCandidate, rate: float, starved: float
) -> tuple[ModuleAllocation, ...]:
    """Return a candidate's encoders and its backbone.

    rate: samples/s of the run. starved: share of its time that the backbone waits for encoders.
    """
    at = request.of(candidate.backbone)
    surrogate, several = surrogate_for(at), len(request.cluster.device_types) > 1

    def encoder(name: str, chosen: Candidate) -> ModuleAllocation:
        share = at.workload.share(name)
        return ModuleAllocation(
            name=f"{name}@{chosen.device_type}" if several else name,
            device_type=chosen.device_type,
            degrees=chosen.degrees,
            share=share,
            rate=chosen.rate,
            production=chosen.rate / share,
            peak_nbytes=at.peak_nbytes(chosen),
            memory_nbytes=at.memory_nbytes(name, chosen.device_type),
            mfu=surrogate.mfu(chosen),
            waiting=blocked_share(chosen.rate / share, rate),
        )

    backbone, memory = candidate.backbone, _memory(at, candidate)
    mfu = surrogate.mfu(backbone)
    if candidate.mode == "monolithic":
        flops = at.workload.flops(at.model)
        mfu *= 1.0 + float(flops.encoders.mean() / (flops.backbone + flops.connector).mean())
    return (
        *(encoder(name, chosen) for name, chosen in candidate.encoders.items()),
        ModuleAllocation(
            name=BACKBONE,
            device_type=backbone.device_type,
            degrees=backbone.degrees,
            share=1.0,
            rate=backbone.rate,
            production=backbone.rate,
            peak_nbytes=memory.peak,
            memory_nbytes=at.memory_nbytes(BACKBONE, backbone.device_type),
            mfu=mfu,
            waiting=starved,
            gradient_reduction=backbone.gradient_reduction,
            num_shards=at.num_shards(backbone),
            memory=memory,
        ),
    )


def _memory(request: Request, candidate: ModeCandidate) -> StepMemory:
    if candidate.encoder_layers is not None:
        return monolithic.memory(request, candidate.backbone, candidate.encoder_layers)
    return request.backbone_memory(candidate.backbone)
