"""From settings, a model and its data to an allocation to show, save and start. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, get_args

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.mode_rating import ModeComparison, ModeRating
from flowtrain.allocator.modes import compare_modes
from flowtrain.allocator.plan import changed_overrides, plan_overrides
from flowtrain.allocator.program.solvers import Solver, SolverName
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.devices import AskedDevices, cluster_of
from flowtrain.controller.planning.mode_plan import plan_of
from flowtrain.controller.planning.nodes import network_note, nodes_needed, with_network
from flowtrain.controller.planning.notes import notes, plan_faults
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.pool import PoolNeed, pool_need, with_pool
from flowtrain.controller.planning.request import device_times, request_of, surrogates
from flowtrain.costs.cluster import Cluster
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE
from flowtrain.costs.profile_trials import trial_conditions, why_not_used
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.errors import ConfigError, Fault
from flowtrain.types.run_plan import Mode, Plan

PLANNING_SCHEMA = 3

_OF_A_CHOICE = ("dp", "tp", "accumulates", "shard_size", "gradient_reduction")
"""Fields of a ``TrainingSetup`` that each candidate configuration sets itself."""


@dataclass(frozen=True)
class PlanReport:
    """All modes that were asked for, their assumptions, and the plan that starts the fastest."""

    planned: Planned
    cluster: Cluster
    setup: TrainingSetup
    """With the settings of the winner; its dp and tp are 1."""
    budget: MemoryBudget
    rules: OperatorRules
    comparison: ModeComparison
    plan: Plan
    profile: Profile | None = None
    """None if rates are from data sheets."""
    where: str = ""
    """Whose devices these are, if they were found and not asked for."""
    asked: AskedDevices = field(default_factory=AskedDevices)
    unused_trials: str | None = None
    """Why the profile's trials do not count; None if they do, or if there are none."""

    @property
    def winner(self) -> ModeRating:
        """What ``plan`` starts."""
        return self.comparison.winner

    @property
    def allocation(self) -> Allocation:
        """The optimum of Eq. 2; a ConfigError if no encoders with devices of their own were planned, or none fit."""
        if self.comparison.allocation is None:
            raise ConfigError(f"this plan of mode {self.winner.mode!r} has no split of devices between modules")
        return self.comparison.allocation

    @property
    def rate(self) -> float:
        """Samples/s of the plan."""
        assert self.winner.rate is not None
        return self.winner.rate

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of the plan."""
        return self.rate * self.planned.workload.tokens_per_sample

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the plan changes in the configuration, as a user would write it on the command line.

        For a model file all that the plan sets, since the run's own configuration is not known.
        """
        return self.overrides_with(())

    def overrides_with(self, keys: Collection[str]) -> tuple[str, ...]:
        """Return ``overrides`` that name these dotted keys as well, as far as the plan sets them."""
        if not self.planned.is_run:
            return plan_overrides(self.plan)
        return changed_overrides(self.plan, self.planned.config, keys)

    @cached_property
    def pool(self) -> PoolNeed:
        """What the plan needs of the memory pool."""
        return pool_need(self.planned, self.plan, self.devices_per_node)

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """Why a run refuses the plan; empty if it does not."""
        of_pool = [self.pool.fault] if self.pool.fault is not None else []
        return (*plan_faults(self.planned, self.plan), *of_pool)

    @property
    def devices_per_node(self) -> int:
        """The number on the largest nodes."""
        return _devices_per_node(self.cluster)

    @property
    def num_nodes(self) -> int:
        """The fewest nodes that have its devices."""
        return nodes_needed(self.winner, self.cluster)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before starting the plan."""
        others = [fault for fault in self.faults if fault is not self.pool.fault]
        found = notes(self.planned, self.comparison, self.cluster, self.plan, others, self.pool)
        network = network_note(self.plan, self.planned.config, self.num_nodes)
        trials = f"the profile's trials do not count, since they ran under other conditions: {self.unused_trials}"
        return (*found, *([network] if network is not None else []), *([trials] if self.unused_trials else []))

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "schema": PLANNING_SCHEMA,
            "source": self.planned.source,
            "workload": self.planned.workload.to_dict(),
            "devices": [asdict(each) for each in self.cluster.device_types],
            "mode": self.winner.mode,
            "reason": self.winner.reason,
            "rate": self.rate,
            "tokens_per_s": self.tokens_per_s,
            "modes": [self._rating_record(rating) for rating in self.comparison.ratings],
            "seconds": self.comparison.seconds,
            "allocation": self.comparison.allocation.to_dict() if self.comparison.allocation is not None else None,
            "assumptions": {
                "profile": self.profile.source if self.profile is not None else None,
                "efficiency": asdict(self.rules.efficiency) if self.profile is None else None,
                "interference": dict(zip(("factor", "is_measured"), self.interference, strict=True)),
                "memory": asdict(self.budget),
                "fill": self.planned.workload.fill,
                "setup": {key: value for key, value in asdict(self.setup).items() if key not in _OF_A_CHOICE},
                "chunks_per_rank": self.chunks,
                "partition": self.planned.config.pipeline.partition,
            },
            "plan": asdict(self.plan),
            "pool": self.pool.as_record(),
            "overrides": list(self.overrides),
            "notes": list(self.notes),
        }

    @property
    def interference(self) -> tuple[float, bool]:
        """Time of encoder and backbone at once on a device over the sum of both alone, and whether it was measured."""
        measured = {} if self.profile is None else self.profile.interference
        factors = [each.factor for each in measured.values()]
        return (max(factors), True) if factors else (ASSUMED_INTERFERENCE, False)

    @property
    def chunks(self) -> int:
        """Slices of the layers on each rank of the plan."""
        settings = self.winner.settings
        return settings.chunks if settings is not None else self.planned.config.pipeline.chunks

    def _rating_record(self, rating: ModeRating) -> dict[str, Any]:
        rate, best = rating.rate, self.rate
        values = asdict(rating)
        for module, plain in zip(rating.modules, values["modules"], strict=True):
            plain["devices"] = module.devices
        values["tokens_per_s"] = None if rate is None else rate * self.planned.workload.tokens_per_sample
        del values["candidate"]
        values["plan"] = None if rating.plan is None else asdict(rating.plan)
        values["of_best"] = None if rate is None else rate / best
        return values


def make_report(
    planned: Planned,
    asked: AskedDevices,
    *,
    solver: SolverName = "auto",
    profile: Profile | None = None,
    may_be_tried: bool = False,
    where: str = "",
) -> PlanReport:
    """Choose mode, degrees and settings, with data sheets' or a profile's rates; ConfigError if nothing fits.

    may_be_tried: more plans than the profile's trials may still run. where: whose devices ``asked.at_hand`` are.
    """
    config, rules = planned.config, OperatorRules.of(planned.config.costs)
    cluster = cluster_of(asked, planned, profile)
    request = request_of(planned, cluster, profile)
    times_of = device_times(config, rules, profile)
    surrogate_for = surrogates(times_of)
    batches = DrawnBatches.draw(request.decided().workload, scheduler=config.step_scheduler)
    trials, unused = () if profile is None else profile.trials, None
    if profile is not None and trials:
        conditions = trial_conditions(config, planned.workload, cluster.num_devices)
        if unused := why_not_used(profile.trial_conditions, conditions):
            trials = ()
    comparison = compare_modes(
        request,
        surrogate_for,
        Solver(solver),
        modes_of(config),
        method=config.allocator.method,
        batches=batches,
        trials=trials,
        may_be_tried=may_be_tried,
        # A profile's trials correct what the formula predicts.
        times_of=times_of if profile is None else None,
    )
    winner = comparison.winner
    setup = (request if winner.settings is None else request.with_settings(winner.settings)).setup
    plan = startable_plan(planned, winner, cluster)
    return PlanReport(planned, cluster, setup, request.budget, rules, comparison, plan, profile, where, asked, unused)


def startable_plan(planned: Planned, rating: ModeRating, cluster: Cluster) -> Plan:
    """Return what starts a mode's best plan, with the memory pool and the network that it needs."""
    plan = with_pool(planned, plan_of(planned, rating, cluster), _devices_per_node(cluster))
    return with_network(plan, planned.config, nodes_needed(rating, cluster))


def modes_of(config: RunConfig) -> tuple[Mode, ...]:
    """Return the modes that a plan compares: the configured one, or for ``auto`` all; ``llm_only`` is only a bound."""
    return get_args(Mode) if config.mode == "auto" else (config.mode,)


def _devices_per_node(cluster: Cluster) -> int:
    """The number on the largest nodes."""
    return max(each.devices_per_node for each in cluster.device_types)
