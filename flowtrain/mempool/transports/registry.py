"""Chooses the transport by source tier, destination tier and distance (FlowTrain 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

from flowtrain.errors import PoolError
from flowtrain.mempool.transports.base import Distance, Transport
from flowtrain.types.memory import Tier

Route = tuple[Tier, Tier, Distance]
"""(source tier, destination tier, distance)."""


class TransportRegistry:
    """The transports of one process, by route."""

    def __init__(self) -> None:
        self._routes: dict[Route, Transport] = {}

    def register(self, source: Tier, destination: Tier, distance: Distance, transport: Transport) -> None:
        """Let a transport serve a route. A route has one transport."""
        route = (source, destination, distance)
        assert route not in self._routes, f"{route} is served by {self._routes[route].name} already"
        self._routes[route] = transport

    def choose(self, source: Tier, destination: Tier, distance: Distance) -> Transport:
        """Return the transport of a route. Raises PoolError, which lists the known routes, if there is none."""
        transport = self._routes.get((source, destination, distance))
        if transport is None:
            known = ", ".join(f"{s} to {d} {far} ({t.name})" for (s, d, far), t in self._routes.items()) or "none"
            raise PoolError(
                f"no transport reads {source} into {destination} at distance {distance}; this process has: {known}. "
                "Place the processes that share data so that one of these serves them"
            )
        return transport

    def __iter__(self) -> Iterator[Transport]:
        """Iterate over the transports, each once."""
        return iter({id(transport): transport for transport in self._routes.values()}.values())
