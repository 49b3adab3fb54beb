"""How the C library gets memory for actors that compute on a CPU: variables that it reads when a process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flowtrain.models.device import HUGE_HEAP, TORCH_HUGE_PAGES

_KEEPING = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": f"{HUGE_HEAP}=1",
}
"""One heap for all threads, from which large tensors come too, and which never shrinks. By default glibc gives a thread
a heap of its own, in pieces of 64 MiB; what is larger, or freed at its end, goes back to the system, and each of its
pages is cleared again when a tensor of the next microbatch gets it. It has huge pages (from glibc 2.35 on)."""
_DECIDING = (*_KEEPING, TORCH_HUGE_PAGES, "LD_PRELOAD")
"""Variables by which a user may have decided it; one is enough. Torch's huge pages do not go with such a heap."""


def memory_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a process that computes on a CPU and keeps freed memory for its next tensors.

    environ: of the process that starts it; by default this one's. None of the variables are there if that decides
    itself.
    """
    environ = os.environ if environ is None else environ
    return {} if any(name in environ for name in _DECIDING) else dict(_KEEPING)


def memory_options(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return Ray's options of an actor with ``memory_variables``; none if there are no variables."""
    variables = memory_variables(environ)
    return {"runtime_env": {"env_vars": variables}} if variables else {}
