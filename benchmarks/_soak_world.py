"""The soak without its loop: its figures, its processes, and the real flow with planner and parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import numpy as np
from _soak_producers import ALIGNMENT, MAX_PATCHES, NUM_FEEDERS, VISION, fed_parts, sample_of

from flowtrain.costs.flops import SampleFlops
from flowtrain.flow.build import assemble_flow
from flowtrain.flow.flow import Flow
from flowtrain.flow.members import Members
from flowtrain.flow.order import InOrder
from flowtrain.flow.parts import Parts
from flowtrain.flow.units import unit_sequence
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.messages import MicrobatchLocation, RankReport
from flowtrain.types.plan import Unit
from flowtrain.types.samples import SamplerState

NUM_ENCODERS, DP_SIZE, POOL_SHARE = 3, 2, 20
MICROBATCH_TOKENS = 4096
MAX_PROCESSES = 8192


class WrongResult(Exception):
    """The soak found a fault."""


@dataclass
class Result:
    """Result of the soak; sizes in bytes.

    fragmentation: 1 - largest free run / free bytes, for each report with more than a tenth of the segment free.
    """

    sum_nbytes: int
    pool_nbytes: int
    num_consumed: int = 0
    num_verified: int = 0
    num_kills: int = 0
    num_remade: int = 0
    num_lost_reads: int = 0
    num_balances: int = 0
    num_split_parts: int = 0
    most_extents: int = 0
    num_full: int = 0
    duration_s: float = 0.0
    fragmentation: list[float] = field(default_factory=list)


@dataclass
class Worker:
    """A producer process, as the soak tracks it."""

    name: str
    index: int
    process: ForkServerProcess
    connection: Connection
    waiting: Callable[[], object | None] | None = None
    ended: bool = False


@dataclass
class Rank:
    """A backbone rank: its place in its unit, and the microbatch that it reads next.

    pool: opened again for each unit, so that its first read of an owner must look the owner up.
    """

    number: int
    pool: Pool
    unit: int = 0
    slot: int = 0
    running: bool = False
    stopped: bool = False
    located: MicrobatchLocation | None = None


def sums(num_samples: int) -> tuple[int, int]:
    """Return the bytes of all features, and of all texts and encoded images."""
    features = fed = 0
    for position in range(num_samples):
        sample = sample_of(position)
        features += sum(part.nbytes for part in sample.parts if part.name == VISION)
        fed += sum(part.nbytes for part in fed_parts(sample))
    return features, fed


def make_flow(num_samples: int, batch: int, space: AddressSpace) -> Flow:
    """Return the run's flow."""
    planner = StepPlanner(
        dp_size=DP_SIZE,
        microbatch_tokens=MICROBATCH_TOKENS,
        packing="best_fit",
        cost=eq3(MICROBATCH_TOKENS),
        num_buckets=2,
        dispatch="lpt",
        max_batch_patches={VISION: MAX_PATCHES},
        alignment=ALIGNMENT,
    )
    return assemble_flow(
        members=Members(MAX_PROCESSES, MAX_PROCESSES),
        parts=Parts(space, alignment=ALIGNMENT, lease_timeout_s=600.0),
        order=InOrder(),
        planner=planner,
        units=unit_sequence(-(-num_samples // batch), batch, num_samples),
        lookahead=2 * num_samples // POOL_SHARE // batch,  # more than the pool holds, so that memory is the limit
        flops_of=lambda sizes: SampleFlops(sizes.positions, *np.zeros((3, len(sizes)))),
        sampler_state=SamplerState(0),
        dp_size=DP_SIZE,
        num_feeders=NUM_FEEDERS,
    )


def report(unit: Unit, rank: int) -> RankReport:
    """A rank's report after a unit."""
    return RankReport(unit.index, unit.kind, unit.step, rank, 1.0, 1.0, 1.0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)


def holders(run_id: str) -> list[str]:
    """Processes that map memory of a run."""
    holders = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if any(run_id in line for line in maps):
                    holders.append(pid)
        except OSError:
            continue  # it ended while we looked
    return holders
