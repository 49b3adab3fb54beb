"""The throughput matching problem: producers, a consumer, what they may choose from, and what a choice is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain.allocator.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Module:
    """A producer, which gets one configuration."""

    name: str
    work: str
    """What it produces; rates of modules with the same work add, others are matched to the consumer one by one."""
    candidates: tuple[Candidate, ...]
    optional: bool = False
    """It may also get none, where an encoder's replicas may be on several types of devices; each work needs one."""


@dataclass(frozen=True, slots=True)
class FlowProblem:
    """Eq. 1 and 2 of FlowTrain 3.3 in numbers."""

    producers: tuple[Module, ...]
    consumer: tuple[Candidate, ...]
    """The backbone's configurations."""
    shares: Mapping[str, float]
    """Of each work, the share of all samples that need it; above 0 and at most 1."""
    devices: Mapping[str, int]
    """Number of devices, by type."""
    one_producer: bool = False
    """Of each work one module alone gets a configuration, as a run can start it; at most one is not optional."""

    def __post_init__(self) -> None:
        works = {module.work for module in self.producers}
        assert works == set(self.shares), (works, self.shares)
        assert all(0.0 < share <= 1.0 for share in self.shares.values()), self.shares

    def producers_of(self, work: str) -> tuple[Module, ...]:
        """Return the modules that do a work."""
        return tuple(module for module in self.producers if module.work == work)


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration a module; optional modules that take none are absent from ``producers``."""

    producers: Mapping[str, Candidate]
    consumer: Candidate


@dataclass(frozen=True, slots=True)
class Levels:
    """What a choice is worth, in lexicographic order."""

    rate: float
    """Samples/s, the smaller of production and consumption."""
    imbalance: float
    """By how much each work's production misses the consumer's demand, in samples of it a second, summed over works."""
    devices: int
    """In all."""


def production(problem: FlowProblem, choice: Choice) -> dict[str, float]:
    """Return by work the samples/s of the whole data that its producers keep up with."""
    return {
        work: sum(made.rate for made in _made(problem, choice, work)) / share for work, share in problem.shares.items()
    }


def levels(problem: FlowProblem, choice: Choice) -> Levels:
    """Return what a choice is worth, computed from its candidates' own numbers."""
    consumed = choice.consumer.rate
    surplus = {
        work: sum(made.rate for made in _made(problem, choice, work)) - share * consumed
        for work, share in problem.shares.items()
    }
    return Levels(
        rate=min(consumed, *production(problem, choice).values()) if problem.shares else consumed,
        imbalance=sum(abs(each) for each in surplus.values()),
        devices=choice.consumer.devices + sum(each.devices for each in choice.producers.values()),
    )


def adds_up(problem: FlowProblem, choice: Choice) -> bool:
    """Whether several modules do the same work."""
    return any(len(_made(problem, choice, work)) > 1 for work in problem.shares)


def _made(problem: FlowProblem, choice: Choice, work: str) -> Sequence[Candidate]:
    producers = problem.producers_of(work)
    return [choice.producers[module.name] for module in producers if module.name in choice.producers]
