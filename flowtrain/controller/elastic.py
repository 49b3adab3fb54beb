"""A run on fewer nodes than it began with: which degrees they have room for, and when all nodes are there again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator

import ray

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.actor_specs import actor_specs_of, bundles_of
from flowtrain.controller.cluster import Bundle
from flowtrain.controller.lost_nodes import NodeWatch
from flowtrain.errors import ConfigError, FlowTrainError, ResourceError, StallError, WorkerLostError

logger = logging.getLogger(__name__)

POLL_S = 10.0
AGAIN_S = 600.0
"""After a cluster that seemed to have room had none: another job may hold it."""


_OF_A_GROWN_RUN = (ConfigError, ResourceError, StallError, WorkerLostError)
"""What may end a run with all its replicas that trained well on fewer: one of its new nodes is bad."""


class StartsAnew(Exception):
    """The run must start anew from its last checkpoint, on other nodes or on fewer. The text says why."""


class Patience:
    """How long a run waits for a lost node without which it cannot go on.

    after_s: ``limits.elastic_after_s``.
    """

    def __init__(self, after_s: float | None, nodes: NodeWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._nodes, self._clock = after_s, nodes, clock
        self._since_s = clock()

    def progressed(self) -> None:
        """A step was trained, an evaluation done, or a checkpoint written."""
        self._since_s = self._clock()

    def check(self) -> None:
        """Raise StartsAnew if a node is lost, and the run made no progress, for so long."""
        lost_s = self._nodes.lost_since_s
        if self._after_s is None or lost_s is None:
            return
        if self._clock() - max(lost_s, self._since_s) >= self._after_s:
            raise StartsAnew(
                f"no step was trained for limits.elastic_after_s ({self._after_s:g} s){self._nodes.reason}"
            )


class RoomWatch:
    """Asks Ray now and then whether a run on fewer nodes has room for all that was asked for. wanted: that run."""

    def __init__(self, wanted: RunConfig, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock = wanted, clock
        self._next_s = clock() + wait_s

    @property
    def waits_s(self) -> float:
        """Seconds until it asks; 0 or less if it is time to."""
        return self._next_s - self._clock()

    def has_room(self) -> bool:
        """Ask, if it is time to; call it often."""
        if self.waits_s > 0.0:
            return False
        self._next_s = self._clock() + POLL_S
        try:
            return _has_room(self._wanted)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            logger.debug("Ray does not say what nodes there are: %s", error)
            return False


class Parts:
    """The parts of one run, each with the degrees that the nodes have room for, until it ends.

    fit: returns a run with the largest degrees that fit and were not refused; see ``fitting``.
    """

    def __init__(self, config: RunConfig, fit: Callable[[RunConfig, Collection[str]], RunConfig] | None = None) -> None:
        self.now = config
        """The part that runs, or is about to."""
        self._asked, self._fit = config, fit or fitting
        self._grown_from: RunConfig | None = None
        self._refused: set[str] = set()
        self._has_moved = False
        self._wait_s = 0.0

    def room_watch(self) -> RoomWatch | None:
        """Return what tells a part on fewer nodes to end since all have room again; None for a whole run."""
        # To end without a checkpoint would cost steps.
        if self.now is self._asked or not self._asked.saves_at_end:
            return None
        return RoomWatch(self._asked, self._wait_s)

    def grow(self) -> None:
        """The part ended after a checkpoint, and all replicas come next."""
        self.now, self._grown_from, self._wait_s = self._asked, self.now, 0.0

    def go_on_after(self, error: StartsAnew | FlowTrainError) -> None:
        """Choose the part that follows one which ended by an error; raises the error if none does.

        Raises ResourceError if not even one replica of each module has room.
        """
        if isinstance(error, StartsAnew):
            logger.warning("%s", error)
            self._refused.clear()
            self.now, self._grown_from, self._wait_s, self._has_moved = self._fit(self._asked, ()), None, 0.0, True
            return
        does_not_start = self._has_moved and isinstance(error, ConfigError | ResourceError)
        is_too_large = self._grown_from is not None and isinstance(error, _OF_A_GROWN_RUN)
        if not (does_not_start or is_too_large):
            raise error
        self._refused.add(degrees_text(self.now))
        logger.warning("the run cannot go on with data_parallel_size %s: %s", degrees_text(self.now), error)
        self.now = self._grown_from if self._grown_from is not None else self._fit(self._asked, self._refused)
        self._grown_from, self._wait_s = None, AGAIN_S


def fitting(config: RunConfig, refused: Collection[str] = ()) -> RunConfig:
    """Return a run with the largest data-parallel degrees that the cluster's nodes have room for, or the run itself.

    The backbone's replicas come first, then those of encoders; other degrees stay. refused: degrees, as
    ``degrees_text`` has them, with which the run could not start. Raises ResourceError if even one
    replica of each has no room.
    """
    with cluster.connected(config):
        for backbone, encoders in _smaller_degrees(config):
            values = {"backbone": backbone, **{f"encoders.{name}": count for name, count in encoders.items()}}
            try:
                smaller = override_config(config, [f"{key}.data_parallel_size={n}" for key, n in values.items()])
            except ConfigError as error:
                logger.debug("%s cannot be: %s", values, error)
                continue
            if degrees_text(smaller) not in refused and _has_room(smaller) and _can_be_joined(smaller):
                return config if degrees_text(smaller) == degrees_text(config) else smaller
    raise ResourceError(
        "the nodes that are left have no room even for one replica of the backbone and of each encoder; --resume goes "
        "on from the last checkpoint once the cluster has room"
    )


def degrees_text(config: RunConfig) -> str:
    """Return the data-parallel degrees of a run as a message has them."""
    counts = {"backbone": config.backbone.data_parallel_size, **_encoder_replicas(config)}
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _smaller_degrees(config: RunConfig) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the backbone's and each encoder's replicas, the most first."""
    encoders = _encoder_replicas(config)
    most = max(encoders.values(), default=1)
    for backbone in range(config.backbone.data_parallel_size, 0, -1):
        for share in range(most, 0, -1):
            yield backbone, {name: -(-count * share // most) for name, count in encoders.items()}


def _encoder_replicas(config: RunConfig) -> dict[str, int]:
    """Replicas of each encoder that has a number of its own."""
    if not config.has_encoder_actors or config.mode == "colocated":
        return {}
    return {name: config.encoder_replicas(name) for name in config.encoders}


def _has_room(config: RunConfig) -> bool:
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    bundles = _bundles(config)
    if config.pool.network == "none":
        bundles = [cluster.total(bundles)]
    return cluster.place(bundles, nodes)[1] is None


def _bundles(config: RunConfig) -> list[Bundle]:
    return bundles_of(actor_specs_of(cluster.with_devices(fixed_plan(config))))


def _can_be_joined(config: RunConfig) -> bool:
    """Whether the network of the pool joins the nodes that the run would have."""
    try:
        cluster.check_resources(_bundles(config), 0, config.pool.network)
    except ResourceError as error:
        logger.debug("%s", error)
        return False
    return True
