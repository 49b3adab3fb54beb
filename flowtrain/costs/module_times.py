"""Times of modules: seconds of a decoder layer, of the head, of a sample's images."""

from __future__ import annotations

from typing import Protocol

from flowtrain.costs.flops import FloatArray


class ModuleTimes(Protocol):
    """Times on one type of devices, by arithmetic or measured.

    num_tokens: of packed microbatches, ``[N]``; a time is of forward and backward with recomputation, of one device of
    a tensor parallel group of ``tp``, its communication inside the group included.
    """

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of one decoder layer, ``[N]``."""
        ...

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of the final norm, the head and the loss, ``[N]``."""
        ...

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of the connector over the microbatch's vision tokens, ``[N]``."""
        ...

    def sample_s(self, encoder: str, tp: int) -> float:
        """Return seconds that an encoder's group takes for a mean sample that has images for it."""
        ...

    def microbatch_s(self) -> float:
        """Return seconds of each microbatch on each stage beside its layers, head and connector."""
        ...

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """Return seconds of a step after its microbatches, of a device that updates so many parameters; ``[N]``."""
        ...
