"""Outputs that only show what a run does: an error of theirs never ends the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Diagnostic:
    """An output that training does not need. Its first error is logged, and from then on it is off.

    name: what the user reads, such as ``trace.json``. retries: it is not switched off, so that each ``attempt`` tries
    again; further errors are not logged.
    """

    def __init__(self, name: str, retries: bool = False) -> None:
        self._name = name
        self._retries = retries
        self._has_failed = False

    @property
    def is_on(self) -> bool:
        """Whether the next ``attempt`` does anything."""
        return self._retries or not self._has_failed

    def attempt(self, write: Callable[..., object], *args: Any) -> None:
        """Call ``write`` unless the output is off."""
        if not self.is_on:
            return
        try:
            write(*args)
        except Exception as error:  # whatever it is, training is worth more
            if not self._has_failed:
                later = "it is tried again later" if self._retries else "it is off from now on"
                logger.warning("%s could not be written, %s, training goes on: %s", self._name, later, error)
            self._has_failed = True

    def close(self, close: Callable[[], object]) -> None:
        """Call ``close``, also for an output that is off; its errors are logged."""
        try:
            close()
        except Exception as error:
            logger.warning("%s could not be closed: %s", self._name, error)
