"""The throughput matching problem: producers, a consumer, their candidates, and the value of a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain.allocator.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Module:
    """A producer, which gets one configuration."""

    name: str
    work: str
    """What it produces. Rates of modules with the same work add up; each work is matched to the consumer."""
    candidates: tuple[Candidate, ...]
    optional: bool = False
    """It may get no configuration: an encoder's replicas may be on any of several types of devices. Each work needs at
    least one producer."""


@dataclass(frozen=True, slots=True)
class FlowProblem:
    """Eq. 1 and 2 of FlowTrain 3.3 in numbers."""

    producers: tuple[Module, ...]
    consumer: tuple[Candidate, ...]
    """The backbone's configurations."""
    shares: Mapping[str, float]
    """Share of all samples that need a work, by work; above 0 and at most 1."""
    devices: Mapping[str, int]
    """Number of devices, by type."""
    one_producer: bool = False
    """Only one module of each work gets a configuration, because a run can start only one; at most one is not
    optional."""

    def __post_init__(self) -> None:
        works = {module.work for module in self.producers}
        assert works == set(self.shares), (works, self.shares)
        assert all(0.0 < share <= 1.0 for share in self.shares.values()), self.shares

    def producers_of(self, work: str) -> tuple[Module, ...]:
        """Return the modules that produce a work."""
        return tuple(module for module in self.producers if module.work == work)


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration per module; optional modules without one are absent from ``producers``."""

    producers: Mapping[str, Candidate]
    consumer: Candidate


@dataclass(frozen=True, slots=True)
class Levels:
    """The value of a choice, in lexicographic order."""

    rate: float
    """Samples/s, the smaller of production and consumption."""
    imbalance: float
    """Difference of each work's production from the consumer's demand, in samples/s that need it, summed over works."""
    devices: int
    """Total number of devices."""


def production(problem: FlowProblem, choice: Choice) -> dict[str, float]:
    """Return, by work, the samples/s of the whole data that its producers can keep up with."""
    return {
        work: sum(each.rate for each in _producing(problem, choice, work)) / share
        for work, share in problem.shares.items()
    }


def levels(problem: FlowProblem, choice: Choice) -> Levels:
    """Return the value of a choice, computed from its candidates' rates and devices."""
    consumed = choice.consumer.rate
    surplus = {
        work: sum(each.rate for each in _producing(problem, choice, work)) - share * consumed
        for work, share in problem.shares.items()
    }
    return Levels(
        rate=min(consumed, *production(problem, choice).values()) if problem.shares else consumed,
        imbalance=sum(abs(each) for each in surplus.values()),
        devices=choice.consumer.devices + sum(each.devices for each in choice.producers.values()),
    )


def adds_up(problem: FlowProblem, choice: Choice) -> bool:
    """Whether several modules produce the same work."""
    return any(len(_producing(problem, choice, work)) > 1 for work in problem.shares)


def _producing(problem: FlowProblem, choice: Choice, work: str) -> Sequence[Candidate]:
    producers = problem.producers_of(work)
    return [choice.producers[module.name] for module in producers if module.name in choice.producers]
