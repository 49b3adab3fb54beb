"""What profilers report to the driver, which builds the tables of ``costs.profile`` from it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a profiler measured of its device."""

    name: str
    """The device's name in torch; ``cpu`` for every CPU."""
    flops: float
    """Peak in FLOP/s in the run's compute type, from a data sheet or measured."""
    memory_nbytes: int
    """Memory of the device; for a CPU, one core's share."""
    bandwidth: float
    """Bandwidth of its memory, in bytes/s."""
    link: float | None
    """Bytes/s that it sends to the group's other devices in an all-reduce; None without other devices."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Median times of one layer that follows a memory strategy."""

    num_tokens: int
    """Of the measured microbatch, or of the measured images in an encoder's layers."""
    seconds: float
    """Forward and backward with recomputation."""
    kept_nbytes: float
    """Device bytes that it keeps from forward to backward."""


@dataclass(frozen=True, slots=True)
class LossTimes:
    """The head and the loss, by the number of tokens with loss."""

    counts: tuple[int, ...]
    """In a microbatch, ascending; ``[C]``."""
    seconds: tuple[float, ...]
    """Median, forward and backward, with each of these more than with the first; ``[C]``."""
    forward_share: float
    """Of the forward in them: the loss may compute its gradients there. 0 if they take no time."""


@dataclass(frozen=True, slots=True)
class BackboneTimes:
    """Median seconds of the backbone's modules; ``N`` measured packed lengths, ascending.

    Of a tensor parallel group assembling, strategies and what a step or a stage takes are 0, or absent.
    """

    layers_s: tuple[float, ...]
    """One decoder layer, forward and backward with recomputation; ``[N]``."""
    heads_s: tuple[float, ...]
    """Final norm, head and loss; ``[N]``."""
    connectors_s: tuple[float, ...]
    """The connector over the microbatch's vision tokens; ``[N]``."""
    assembling_s: float
    """Assembling the longest microbatch."""
    step_s: float
    """Each step, in addition to its microbatches; does not depend on the model's size."""
    parameter_s: float
    """Each step, per parameter that the device clips and updates."""
    embeddings_s: tuple[float, ...] = ()
    """The gradient of the embedding; ``[N]``, or none."""
    ends_s: float = 0.0
    """Each step, its first forward and its last backward beyond others; does not depend on the model's size."""
    ends_parameter_s: float = 0.0
    """Likewise, per parameter."""
    ends_forward_share: float = 0.0
    """Of the forward in both."""
    first_backward_parameter_s: float = 0.0
    """Each step, per parameter, what its first backward takes less: it adds its gradients to none."""
    square_s: float = 0.0
    """Attention in one decoder layer, forward and backward with recomputation, per squared token of a sub-sequence."""
    squares: tuple[float, ...] = ()
    """Mean sums over sub-sequences of their squared tokens in the measured microbatches; ``[N]``, or none."""
    ragged_s: float = 0.0
    """As ``square_s``, in addition where the sub-sequence's length is ragged (``ragged_squares``)."""
    ragged: tuple[float, ...] = ()
    """As ``squares``, of those alone."""
    losses: LossTimes = LossTimes((1,), (0.0,), 0.0)
    """Of the tokens with loss."""
    targets: tuple[float, ...] = ()
    """Mean tokens with loss in the measured microbatches; ``[N]``, or none."""
    vision_tokens: tuple[float, ...] = ()
    """Mean vision tokens in the measured microbatches; ``[N]``, or none."""
    strategies: dict[str, LayerTimes] = field(default_factory=dict)
    """One decoder layer by memory strategy, as ``activation_checkpointing`` calls it."""
    forward_share: float = 1.0 / 3.0
    """Of the forward in the time of a decoder layer over the longest microbatch."""
    head_forward_share: float = 1.0 / 3.0
    """Likewise of final norm, head and loss."""
    pass_s: float = 0.0
    """The forward and the backward of any pipeline stage, whatever it computes; ``heads_s`` have one stage's."""
    pass_forward_share: float = 0.5
    """Of the forward in it."""


@dataclass(frozen=True, slots=True)
class EncoderTimes:
    """Median seconds of one encoder's forward over image sizes and batch sizes."""

    num_patches: tuple[int, ...]
    """Patches of an image, ascending; ``[P]``."""
    batch: tuple[int, ...]
    """Images of a batch, ascending; ``[B]``."""
    seconds: tuple[tuple[float, ...], ...]
    """One forward; ``[P, B]``."""
    decode_s: float
    """Mean of reading, decoding and preprocessing one image in one thread."""
    strategies: dict[str, LayerTimes] = field(default_factory=dict)
    """One layer, trained, by memory strategy; none if the tower's layers cannot be taken apart."""


@dataclass(frozen=True, slots=True)
class ReplicaSteps:
    """Median seconds of steps with few and with many layers, each ``[2]``; fewer layers first."""

    num_parameters: tuple[int, int]
    """Trainable parameters of the model in use, before ranks share them."""
    microbatch_s: tuple[float, float]
    """A short microbatch in the middle of a step."""
    beside_s: tuple[float, float]
    """A step, in addition to its microbatches and to what its ends take more or less."""
    first_s: tuple[float, float] = (0.0, 0.0)
    """Its first forward, beyond one in the middle."""
    last_s: tuple[float, float] = (0.0, 0.0)
    """Its last backward, likewise."""
    first_backward_s: tuple[float, float] = (0.0, 0.0)
    """What its first backward takes less than one in the middle; 0 if it takes more."""

    @property
    def ends_s(self) -> tuple[float, float]:
        """Its first forward and its last backward, beyond those in the middle."""
        (first, first_deep), (last, last_deep) = self.first_s, self.last_s
        return first + last, first_deep + last_deep


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Median or mean seconds of one call to another actor on the node."""

    wall_s: float
    """Until the answer is there, calls one after another."""
    asking_s: float
    """Processor time of the process that asks, calls one at a time with pauses."""
    answering_s: float
    """Processor time of the process that answers, likewise."""
