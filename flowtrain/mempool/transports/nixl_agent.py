"""A NIXL agent for the transport. No other module imports NIXL, an optional dependency."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flowtrain.errors import ResourceError

logger = logging.getLogger(__name__)

_MODULES = ("nixl_cu12", "nixl_cu13")  # one build per CUDA release; without a device both do the same
NIXL_INSTALL = "pip install 'flowtrain[nixl-cu12]', or 'flowtrain[nixl-cu13]' for CUDA 13"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_UCX_DEFAULTS = {"UCX_TCP_TX_SEG_SIZE": "64k"}
"""UCX settings, unless the user set them. Over TCP, UCX answers a READ in segments of this size; with its default of
8 KiB large batches are several times slower. Other links ignore it."""

_WAKE_US = 10_000
"""How often NIXL's thread looks for work without being woken. With 0, the value of NIXL's own Python API, the thread
spins and takes a core of every process."""

Descriptor = tuple[int, int, int]
"""(address, nbytes, 0) in DRAM."""
T = TypeVar("T")


class TransferError(Exception):
    """NIXL refused a call, or a transfer broke off. The transport raises its own error for it."""


def nixl_module() -> str | None:
    """Return the name of the installed NIXL package, or None."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


class Agent:
    """A process's connection to the network. Not thread-safe: the caller lets in one thread at a time.

    name: unique on the network.
    serves: other processes read this process's memory. The agent then has a thread that answers them and sleeps until
        it is woken. Without the thread, transfers advance when the caller asks for their state; where the network can
        read memory itself, they also advance without that.

    Raises ResourceError if NIXL is not installed or does not start.
    """

    def __init__(self, name: str, *, serves: bool) -> None:
        module = nixl_module()
        if module is None:
            raise ResourceError(
                f"reads between nodes need NIXL, and none of {', '.join(_MODULES)} is installed on this node: "
                f"{NIXL_INSTALL}, on every node, or set pool.network: none to keep to one node"
            )
        _warn_of_slow_settings()
        for variable, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        importlib.import_module(module)  # finds its plugins
        self._nixl: Any = importlib.import_module(f"{module}._bindings")
        self._errors = tuple(kind for key, kind in vars(self._nixl).items() if key.endswith("Error"))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _WAKE_US
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", {})
        except (*self._errors, RuntimeError) as error:
            raise ResourceError(f"NIXL ({module}) does not start its UCX backend on this node: {error}") from error
        self._registered: list[tuple[Any, object]] = []

    def register(self, address: int, nbytes: int, owner: object) -> None:
        """Register memory with the network until the agent closes; ``owner`` is kept alive until then."""
        registration = self._regions([(address, nbytes)])
        self._call(self._agent.registerMem, registration)
        self._registered.append((registration, owner))

    def metadata(self, memory: Sequence[tuple[int, int]]) -> bytes:
        """Return what a peer needs to connect and to read these registered runs of (address, nbytes)."""
        return bytes(self._call(self._agent.getLocalPartialMD, self._regions(memory), True, [self._backend]))

    def connect(self, metadata: bytes) -> str:
        """Connect to a peer, or take in its new metadata; returns its name. Raises TransferError without an answer."""
        return self._call(self._agent.loadRemoteMD, metadata).decode()

    def disconnect(self, name: str) -> None:
        """Let go of a peer, dead or alive."""
        try:
            self._call(self._agent.invalidateRemoteMD, name)
        except TransferError as error:
            logger.debug("%s was not connected any more: %s", name, error)

    def read(self, name: str, here: list[Descriptor], there: list[Descriptor]) -> int:
        """Start one transfer of all these runs. Returns its handle. Raises TransferError if the peer is gone."""
        runs = [self._nixl.nixlXferDList(self._nixl.DRAM_SEG, descriptors) for descriptors in (here, there)]
        handle = int(self._call(self._agent.createXferReq, self._nixl.NIXL_READ, *runs, name))
        try:
            self._call(self._agent.postXferReq, handle)
        except TransferError:
            self.release(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether a transfer is complete. Raises TransferError if it broke off."""
        state = self._call(self._agent.getXferStatus, handle)
        if state not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise TransferError("the transfer broke off")
        return bool(state == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> bool:
        """Forget a transfer. Returns False while it runs and cannot be stopped, so that bytes may still arrive."""
        try:
            self._call(self._agent.releaseXferReq, handle)
        except TransferError as error:
            logger.debug("a transfer could not be released: %s", error)
            return False
        return True

    def close(self) -> None:
        """Leave the network, and only then let go of the memory: NIXL crashes if memory is freed first."""
        for registration, _ in reversed(self._registered):
            try:
                self._call(self._agent.deregisterMem, registration)
            except TransferError as error:
                logger.debug("memory could not be deregistered: %s", error)
        self._agent = None
        self._registered.clear()

    def _regions(self, memory: Sequence[tuple[int, int]]) -> Any:
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, nbytes, 0, "") for address, nbytes in memory])

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return function(*args)
        except self._errors as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error


def _warn_of_slow_settings() -> None:
    for variable in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(variable, "").lower().replace(" ", ""):
            logger.warning(
                "%s has expandable_segments:True, with which NIXL reads device memory hundreds of times slower without "
                "a warning; leave it out when encoders and backbone are on different nodes",
                variable,
            )
