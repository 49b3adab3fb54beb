"""Which actors a plan calls for, and which of them share a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from flowtrain.actors.feeder import NAME as FEEDER
from flowtrain.allocator.plan import ModulePlan, Plan
from flowtrain.controller.cluster import Bundle
from flowtrain.controller.state import Role


@dataclass(frozen=True)
class Post:
    """One actor to start: its name and role, the module it serves, its place among the module's actors.

    place: posts of the same one follow each other and lie on one node (the ranks of a tensor parallel group).
    """

    name: str
    role: Role
    module: str
    index: int
    plan: ModulePlan
    place: str

    @property
    def bundle(self) -> Bundle:
        """What Ray reserves for it."""
        bundle = {"CPU": self.plan.num_cpus, "GPU": self.plan.num_devices}
        return {name: amount for name, amount in bundle.items() if amount > 0}


def posts_of(plan: Plan) -> list[Post]:
    """Every actor of the plan but the coordinator; encoders are numbered over all modules, ranks as in ``Degrees``."""
    posts: list[Post] = []
    for module, module_plan in plan.encoders.items():
        for index in range(module_plan.num_actors):
            name = f"encoder-{len(posts)}"
            posts.append(Post(name, Role.ENCODER, module, index, module_plan, name))
    degrees = plan.backbone.degrees
    for rank in range(degrees.world_size):
        dp_rank, pp_rank, tp_rank = degrees.coordinates(rank)
        place = f"backbone-dp{dp_rank}-pp{pp_rank}"
        posts.append(Post(f"{place}-tp{tp_rank}", Role.BACKBONE, "backbone", rank, plan.backbone, place))
    posts.append(Post(FEEDER, Role.FEEDER, "feeder", 0, plan.feeder, FEEDER))
    return posts


def bundles_of(posts: Sequence[Post]) -> list[Bundle]:
    """What Ray is to reserve, one bundle a place that takes anything; a bundle lies on one node."""
    bundles = [_sum([post.bundle for post in group]) for _, group in groupby(posts, key=attrgetter("place"))]
    return [bundle for bundle in bundles if bundle]


def bundle_indices(posts: Sequence[Post]) -> list[int]:
    """The index in ``bundles_of`` of each post's bundle; -1 for one that takes nothing."""
    indices: list[int] = []
    number = -1
    for _, group in groupby(posts, key=attrgetter("place")):
        takes = [bool(post.bundle) for post in group]
        number += any(takes)
        indices += [number if takes_some else -1 for takes_some in takes]
    return indices


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: round(sum(bundle.get(name, 0.0) for bundle in bundles), 4) for name in names}
