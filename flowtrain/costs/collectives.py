"""Collectives of data parallel ranks: the links that they have, and what computing hides of them."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray, IntArray

BACKWARD_SHARE = 2.0 / 3.0
"""Of the time of forward and backward."""


def group_link(device: DeviceType, members: IntArray, apart: IntArray) -> FloatArray:
    """Return the bytes/s of each member of a collective in groups of devices, ``[C]``.

    members: devices of a group. apart: devices from one to the next. A group inside a node has the node's links. What
    crosses nodes enters a node once, over the network links of all its members there; the node with the fewest, which
    is the last one of a group that does not fill it, sets the pace.
    """
    per_node, rest = device.devices_per_node, members * apart % device.devices_per_node
    inside = members * apart <= per_node
    together = np.maximum(np.where(rest > 0, rest, per_node) // apart, 1) * device.links.network
    return np.where(inside, device.links.node, np.minimum(device.links.node, together))
