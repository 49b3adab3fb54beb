"""Times of modules, in seconds: a decoder layer, the head, a sample's images."""

from __future__ import annotations

from typing import Protocol

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchSeconds


class ModuleTimes(Protocol):
    """Times on one type of device, computed or measured.

    A time is that of forward and backward with recomputation on one device of a tensor parallel group of ``tp``. It
    includes the communication inside the group. num_tokens: of packed microbatches, ``[N]``.
    """

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of one decoder layer, ``[N]``."""
        ...

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of the final norm, the head and the loss, ``[N]``."""
        ...

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """Return seconds of the connector over the microbatch's vision tokens and of the embedding's gradient, ``[N]``.

        The latter is 0 where it is in the head's time.
        """
        ...

    def microbatches_s(self, works: MicrobatchColumns, tp: int) -> MicrobatchSeconds:
        """Return seconds of single microbatches' own work, where the methods above take the data's mix."""
        ...

    def images_s(self, encoder: str, tp: int, *, together: FloatArray | float | None = None) -> FloatArray:
        """Return seconds of an encoder's group for each representative sample's images, ``[S]``; 0 without images.

        together: the backbone's ranks hold the encoder and forward so many images at once, ``[S]`` or one number: those
        of a microbatch. No batches are leased and no features go elsewhere. None: an encoder actor's batches.
        """
        ...

    def encode_stages_s(self, encoder: str, tp: int) -> tuple[FloatArray, FloatArray]:
        """Return seconds of an encoder actor for each sample's images in its two stages, each ``[S]``.

        One batch is decoded by its threads (0 if that is not known, or if the device decodes too) while another one is
        forwarded. ``images_s`` is the longer of both.
        """
        ...

    def sample_s(self, encoder: str, tp: int) -> float:
        """Return the mean of ``images_s`` over samples that have images."""
        ...

    def microbatch_s(self, replica_size: IntArray) -> FloatArray:
        """Return seconds of each microbatch on each rank in addition to its layers, head and connector, ``[N]``.

        replica_size: ranks of a replica, pipeline times tensor parallel.
        """
        ...

    @property
    def launch_s(self) -> float:
        """Seconds of a pipeline rank for each transfer, whatever its size: to start it and to wait for it."""
        ...

    @property
    def forward_share(self) -> float:
        """Share of the forward in the time of the backbone's layers."""
        ...

    @property
    def pass_s(self) -> float:
        """Seconds of a backbone stage's forward and backward beside its layers, head and connector."""
        ...

    @property
    def pass_forward_share(self) -> float:
        """Share of the forward in ``pass_s``."""
        ...

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """Return seconds of a step after its microbatches, on a device that updates ``num_parameters``; ``[N]``."""
        ...

    def ends_s(self, trained: FloatArray) -> FloatArray | None:
        """Return seconds that a step's first forward and last backward take more than others, ``[N]``.

        trained: parameters of a rank that shares them with none; it copies them there. None: nothing was measured.
        """
        ...

    @property
    def ends_forward_share(self) -> float:
        """Share of the forward in ``ends_s``."""
        ...

    def first_backward_s(self, trained: FloatArray) -> FloatArray:
        """Return seconds that a step's first backward takes less than others, ``[N]``: it adds its gradients to none.

        trained: parameters of which a device has gradients.
        """
        ...

    def slowdown(self, encoder: str) -> float | None:
        """Return the time of an encoder and the backbone at once on a device over the sum of both alone.

        None if it was not measured.
        """
        ...

    @property
    def collectives(self) -> float:
        """Factor of what computing does not hide of gathers and reductions over replicas; 1 if no run told it.

        ``replicas_s`` has it already.
        """
        ...

    def replicas_s(
        self, sharding: str, parameters: FloatArray, shards: FloatArray
    ) -> tuple[FloatArray, FloatArray] | None:
        """Return seconds of gathers a microbatch and of the reduction a step, where nothing overlaps; each ``[N]``.

        parameters: of a rank before ``shards`` replicas share them. None: by the links' bandwidth, with overlap.
        """
        ...

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        """Return processor seconds of a step that the run's own processes take from the devices, in all; ``[N]``.

        num_microbatches: of all replicas. has_encoders: encoder actors lease images. 0 on accelerators.
        """
        ...


def mean_with_images(seconds: FloatArray, num_images: IntArray) -> float:
    """Return the mean of ``images_s`` over samples that have images; 0 if none has."""
    return float(seconds.sum()) / max(int((num_images > 0).sum()), 1)
