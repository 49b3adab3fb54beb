"""A NIXL agent as the transport needs it. Nothing else imports NIXL, which is an optional dependency."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from flowtrain.errors import ResourceError

logger = logging.getLogger(__name__)

_MODULES = ("nixl_cu12", "nixl_cu13")  # one build a CUDA release; without a device all do the same
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_UCX_DEFAULTS = {"UCX_TCP_TX_SEG_SIZE": "64k"}
"""What UCX is told unless the user did: over TCP it answers a READ in segments of this size; with its own 8 KiB large
batches are several times slower. Other links do not look at it."""

Descriptor = tuple[int, int]
"""(address, nbytes) in DRAM."""
T = TypeVar("T")


class TransferError(Exception):
    """NIXL refused or broke off; the transport says what that means."""


def nixl_module() -> str | None:
    """Return the name of the installed NIXL package, or None."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


class Agent:
    """One end of the network. Not thread-safe: the caller lets in one thread at a time.

    Raises ResourceError where NIXL is not installed or does not start.
    """

    def __init__(self, name: str) -> None:
        module = nixl_module()
        if module is None:
            raise ResourceError(
                f"reads between nodes need NIXL, and none of {', '.join(_MODULES)} is installed on this node: "
                "pip install 'flowtrain[nixl]' on every node, or set pool.network: none to keep to one node"
            )
        _warn_of_slow_settings()
        for variable, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        api, bindings = importlib.import_module(f"{module}._api"), importlib.import_module(f"{module}._bindings")
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it would announce every agent on stdout
        self._errors = tuple(kind for key, kind in vars(bindings).items() if key.endswith("Error"))
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        except (*self._errors, RuntimeError) as error:
            raise ResourceError(f"NIXL ({module}) does not start its UCX backend on this node: {error}") from error
        self._registered: list[tuple[Any, object]] = []

    def register(self, address: int, nbytes: int, owner: object) -> None:
        """Make memory known to the network, for as long as the agent lives; ``owner`` is kept alive until then."""
        registration = self._call(self._agent.register_memory, [(address, nbytes, 0, "")], "DRAM")
        self._registered.append((registration, owner))

    def metadata(self, memory: Sequence[Descriptor]) -> bytes:
        """Return what a peer needs to connect and to read these registered runs."""
        descriptors = self._agent.get_reg_descs([(address, nbytes, 0, "") for address, nbytes in memory], "DRAM")
        return bytes(self._call(self._agent.get_partial_agent_metadata, descriptors, True, ["UCX"]))

    def connect(self, metadata: bytes) -> str:
        """Take in a peer, or what is new of it; returns its name. Raises TransferError where nobody answers."""
        name = self._call(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, name: str) -> None:
        """Let go of a peer, dead or alive."""
        try:
            self._call(self._agent.remove_remote_agent, name)
        except TransferError as error:
            logger.debug("%s was not connected any more: %s", name, error)

    def read(self, name: str, here: Sequence[Descriptor], there: Sequence[Descriptor]) -> Any:
        """Start one transfer of all these runs; returns its handle. Raises TransferError if the peer is gone."""
        handle = self._call(self._agent.initialize_xfer, "READ", self._runs(here), self._runs(there), name)
        try:
            if self._call(self._agent.transfer, handle) == "ERR":
                raise TransferError("the transfer failed when it was posted")
        except TransferError:
            self.release(handle)
            raise
        return handle

    def is_done(self, handle: Any) -> bool:
        """Whether a transfer is complete. Raises TransferError if it broke off."""
        state = self._call(self._agent.check_xfer_state, handle)
        if state == "ERR":
            raise TransferError("the transfer broke off")
        return bool(state == "DONE")

    def release(self, handle: Any) -> bool:
        """Forget a transfer; False while it is under way and cannot be broken off, so that bytes may still arrive."""
        try:
            self._call(handle.release)
        except TransferError as error:
            logger.debug("a transfer could not be released: %s", error)
            return False
        return True

    def close(self) -> None:
        """Leave the network; only then the memory is let go, since NIXL crashes on memory that went before it."""
        for registration, _ in reversed(self._registered):
            try:
                self._call(self._agent.deregister_memory, registration)
            except TransferError as error:
                logger.debug("memory could not be deregistered: %s", error)
        self._agent = None
        self._registered.clear()

    def _runs(self, runs: Sequence[Descriptor]) -> Any:
        table = np.zeros((len(runs), 3), np.uint64)
        table[:, :2] = runs
        return self._agent.get_xfer_descs(table, "DRAM")

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
                "saying so; leave it out when encoders and backbone are on different nodes",
                variable,
            )
