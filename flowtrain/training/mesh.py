"""Process groups: joining one, and the device mesh of the backbone's ranks."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.errors import StallError
from flowtrain.types.plan import Degrees

DP_AXIS, PP_AXIS, TP_AXIS = "dp", "pp", "tp"
_REPLICATE_AXIS, _SHARD_AXIS = "dp_replicate", "dp_shard"
LOOPBACK = "127.0.0.1"
CHECKPOINT_TIMEOUT_S = 3600.0
"""Ranks wait at least this long for each other while a checkpoint is written."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class BackboneGroup:
    """Mesh and process groups of one backbone rank."""

    rank: int
    degrees: Degrees
    device: torch.device
    mesh: DeviceMesh
    """Device mesh with the axes ``dp``, ``pp`` and ``tp``, also if a degree is 1. Under hybrid sharding ``dp`` is two
    axes: replicas of a set of shards, and the shards."""
    process_group: dist.ProcessGroup
    """All ranks; carries CPU tensors over gloo and device tensors over the device's own backend."""
    checkpoint_group: dist.ProcessGroup
    """All ranks over gloo, for checkpoints alone, so that writing never mixes with training."""
    reading_group: dist.ProcessGroup | None = None
    """The ranks of this rank's replica over gloo, for its prefetch threads alone; None if the replica has one rank."""
    replica_group: dist.ProcessGroup | None = None
    """The same ranks over gloo, for control messages of the training threads; None if the replica has one rank."""

    @property
    def dp_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP shards: ``[dp]``, or ``[replicas, shards]`` under hybrid sharding."""
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh[DP_AXIS] if DP_AXIS in names else self.mesh[_REPLICATE_AXIS, _SHARD_AXIS]

    @property
    def shard_size(self) -> int:
        """Data parallel ranks that share one set of shards."""
        return int(self.dp_mesh.shape[-1])

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.degrees.world_size

    @property
    def dp_rank(self) -> int:
        """Which data parallel replica this rank is part of."""
        return self.degrees.coordinates(self.rank)[0]

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.degrees.coordinates(self.rank)[1]

    @property
    def tp_rank(self) -> int:
        """Place in the tensor parallel group."""
        return self.degrees.coordinates(self.rank)[2]

    def pipeline_peer(self, pp_rank: int) -> int:
        """Rank at the place ``pp_rank`` of this rank's pipeline."""
        return self.degrees.rank(self.dp_rank, pp_rank, self.tp_rank)

    def exchange(self, data: torch.Tensor, piece: int) -> None:
        """Complete ``data`` on the tensor parallel group, of whose pieces of that length rank i has filled the i-th."""
        group = self.mesh[TP_AXIS].get_group()
        works = [
            dist.broadcast(place, group=group, group_src=rank, async_op=True)
            for rank, place in enumerate(data.split(piece))
        ]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Destroy the groups; none can be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()


def open_listener(host: str = LOOPBACK) -> socket.socket:
    """Bind the rendezvous socket of rank 0 to ``host`` and a free port; ``listener.getsockname()[1]`` is the port.

    The store would bind to all interfaces if it opened the socket itself.
    """
    return socket.create_server((host, 0))


def init_backbone_group(
    rank: int,
    degrees: Degrees,
    device: torch.device,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    listener: socket.socket | None = None,
    shard_size: int | None = None,
    start_timeout_s: float = 300.0,
    collective_timeout_s: float = 900.0,
) -> BackboneGroup:
    """Join this process to the backbone's group; returns when all ranks have joined.

    host, port: address on which rank 0 listens.
    listener: on rank 0 the socket of `open_listener`; the group takes it over. None on other ranks.
    shard_size: neighbouring data parallel ranks that share one set of shards (hybrid sharding); None: all.
    start_timeout_s: limit for all ranks to join.
    collective_timeout_s: limit of each collective.

    A single rank needs no host, port and listener. Raises StallError if not all ranks join in time.
    """
    with waiting_for_ranks(f"backbone rank {rank} of {degrees.world_size}", host, port, start_timeout_s):
        join_process_group(
            rank,
            degrees.world_size,
            device,
            host=host,
            port=port,
            listener=listener,
            start_timeout_s=start_timeout_s,
            collective_timeout_s=collective_timeout_s,
        )
        # Slow storage must not end training that goes on beside it; the driver notices dead ranks anyway.
        checkpoint_timeout_s = max(collective_timeout_s, CHECKPOINT_TIMEOUT_S)
        checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint_timeout_s))
        reading_group, replica_group = (_replica_group(rank, degrees, collective_timeout_s) for _ in range(2))
        mesh = device_mesh(degrees, device, shard_size)
    assert dist.group.WORLD is not None
    return BackboneGroup(rank, degrees, device, mesh, dist.group.WORLD, checkpoint_group, reading_group, replica_group)


def join_process_group(
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    host: str,
    port: int,
    listener: socket.socket | None,
    start_timeout_s: float,
    collective_timeout_s: float,
) -> dist.Store:
    """Make this process a rank of its default group; returns the store through which the ranks met.

    Call it within ``waiting_for_ranks``; arguments as for ``init_backbone_group``.
    """
    assert not dist.is_initialized(), "a process belongs to one group"
    assert world_size == 1 or (listener is not None) == (rank == 0), "rank 0, and only it, brings the listener"
    store = _store(world_size, host, port, listener, start_timeout_s)
    dist.init_process_group(
        backend=_backend(device),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    return store


@contextmanager
def waiting_for_ranks(who: str, host: str, port: int, timeout_s: float) -> Iterator[None]:
    """In this block gloo listens on the interface that reaches ``host``; a failed join raises StallError.

    who: this process, for the message.
    """
    try:
        with _gloo_interface(host):
            yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise StallError(
            f"{who} waited {timeout_s:g} s (limits.start_timeout_s) for the other ranks at {host}:{port} ({error})"
        ) from error


def device_mesh(degrees: Degrees, device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Return the mesh of all ranks (see ``BackboneGroup``); collective.

    shard_size: as for ``init_backbone_group``.
    """
    ranks = torch.arange(degrees.world_size).view(degrees.dp, degrees.pp, degrees.tp)
    if shard_size is None or shard_size == degrees.dp:
        return DeviceMesh(device.type, ranks, mesh_dim_names=(DP_AXIS, PP_AXIS, TP_AXIS))
    assert degrees.dp % shard_size == 0, (degrees, shard_size)
    return DeviceMesh(
        device.type,
        ranks.view(-1, shard_size, degrees.pp, degrees.tp),
        mesh_dim_names=(_REPLICATE_AXIS, _SHARD_AXIS, PP_AXIS, TP_AXIS),
    )


def _replica_group(rank: int, degrees: Degrees, timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group of the ranks of this rank's replica, which only they make."""
    size = degrees.replica_size
    if size == 1:
        return None
    first = rank - rank % size
    ranks = list(range(first, first + size))
    timeout = timedelta(seconds=timeout_s)
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)


def _store(world_size: int, host: str, port: int, listener: socket.socket | None, timeout_s: float) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    if listener is None:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    port = listener.getsockname()[1]
    # The store closes the descriptor, so the Python object must let go of it.
    descriptor = listener.detach()
    return dist.TCPStore(host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def _backend(device: torch.device) -> str:
    device_backend = dist.get_default_backend_for_device(device)
    return device_backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{device_backend}"


@contextmanager
def _gloo_interface(host: str) -> Iterator[None]:
    """Let gloo listen on the interface that reaches ``host``, and only there; a user's own choice stays.

    Gloo reads the interface from the environment alone. Without it, gloo asks the resolver for the machine's name.
    """
    interface = _interface_of(_local_address(host))
    if interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _local_address(host: str) -> str:
    """This machine's own IPv4 address on the way to ``host`` (connecting a datagram socket sends nothing)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
