"""Control messages between the coordinator and the actors of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.types.evaluation import EvalRounds, GeneratedAnswer
from flowtrain.types.memory import Extent, PoolStats
from flowtrain.types.plan import CostModel, EncodeBatch, StepPlan, Unit, UnitKind
from flowtrain.types.samples import Rejection, SampleRef, SamplerState, SizedSample
from flowtrain.types.wire import message


@message
class PartReady:
    """An owner's report that it has put a part into its segment."""

    position: int
    part: str
    """``TEXT_PART``, ``IMAGES_PART`` or an encoder's name."""
    epoch: int
    """Epoch of the lease; 0 for what a feeder puts."""
    extents: tuple[Extent, ...]
    """Where the part lies, in row order."""


@message
class ImageBytes:
    """Where a sample's encoded images lie."""

    extents: tuple[Extent, ...]
    nbytes: tuple[int, ...]
    """Bytes of each image; the images follow each other in the extents."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch leased to one owner. The owner forwards it whole, so that features never change."""

    lease_id: int
    """Unique in the run."""
    epoch: int
    """Reports under an older epoch are refused."""
    batch: EncodeBatch
    refs: tuple[SampleRef, ...]
    """The samples of the batch, without rejected ones."""
    images: tuple[ImageBytes, ...]
    """Where the encoded images of each of them lie."""
    needed: tuple[int, ...]
    """Positions whose features go into the pool."""
    nbytes: int
    """Bytes that the needed parts take, each aligned; reserved in the owner's segment until they are READY."""


@message
class PartLocation:
    """Where a READY part lies now."""

    position: int
    part: str
    extents: tuple[Extent, ...]
    pieces: tuple[int, ...] = ()
    """Bytes of each image, for a part of encoded images; they follow each other in the extents."""
    ref: SampleRef | None = None
    """The sample, for a part of encoded images."""


@dataclass(frozen=True, slots=True)
class MicrobatchLocation:
    """Everything that a replica needs to read one microbatch."""

    unit: int
    """Index of its unit."""
    slot: int
    """Index of the microbatch on its replica."""
    dp_rank: int
    """Replica that runs it."""
    parts: tuple[PartLocation, ...]
    """All parts of its positions, without rejected positions."""
    rejected: tuple[int, ...]
    """Planned positions that the replica leaves out."""


@dataclass(frozen=True, slots=True)
class LocatedTexts:
    """A microbatch that all ranks of a replica read now, as the replica's leader sends it to them."""

    location: MicrobatchLocation
    texts: tuple[bytes, ...] | None
    """Bytes of its text parts, in the order of the location; None: an owner died, so nothing is read now."""
    image_sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """In ``monolithic`` mode: of each sample with images, in the order of the location and without those of
    ``rejections``, height and width (pixels) of each image as it enters the tower."""
    rejections: tuple[Rejection, ...] = ()
    """In ``monolithic`` mode: samples with an image that cannot be decoded; the replica leaves them out."""


@dataclass(frozen=True, slots=True)
class Span:
    """A timed piece of one actor's work, for the trace."""

    actor: str
    """Name of the actor."""
    name: str
    """Kind of work."""
    start_s: float
    """On the run's clock: seconds since the Unix epoch, by the coordinator's node."""
    end_s: float
    """As ``start_s``."""
    args: dict[str, int | float | str] = field(default_factory=dict)
    """Details that the trace shows."""
    produces: tuple[int, ...] = ()
    """Positions whose features it produced: arrows lead from it to the spans that consume them."""
    consumes: tuple[int, ...] = ()
    """Positions whose features it consumed."""


@message
class SampleLoss:
    """The loss of one sample of a step."""

    position: int
    loss: float
    """Sum over its target tokens; with ``loss_normalization: sample`` their mean."""
    weight: int
    """What the losses of several samples are divided by: its target tokens, or 1."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one backbone rank reports after a unit; the flow merges the reports of a replica's ranks."""

    unit: int
    """Index of the unit."""
    kind: UnitKind
    step: int
    """Training step of the unit, as in ``Unit``."""
    dp_rank: int
    """The rank's replica."""
    loss: float
    """Global, so equal on all ranks."""
    grad_norm: float | None
    """Global; None for an evaluation."""
    lr: float | None
    """Learning rate; None for an evaluation."""
    num_samples: int
    """Over all ranks."""
    num_tokens: int
    """Over all ranks."""
    num_target_tokens: int
    """Tokens that carry loss, over all ranks."""
    started_s: float
    """On the run's clock, as of ``Span``."""
    finished_s: float
    """On the run's clock."""
    starved_s: float
    """Seconds that this rank waited for plans and microbatches since its last report."""
    fetch_s: float
    """Seconds that its prefetch thread took to read and assemble the microbatches of the unit."""
    microbatch_s: tuple[float, ...] = ()
    """Seconds of each microbatch's forward and backward, by slot, without waits for data. Empty for an evaluation."""
    rewound_to: int | None = None
    """Step of the checkpoint to which weights and optimizer went back after the unit; None: they did not."""
    read_nbytes: int = 0
    """Bytes of features or encoded images that this rank read for the unit."""
    host_s: float | None = None
    """On an emulated device: seconds of the unit in which it neither computed nor waited for data or another rank."""
    generated: tuple[GeneratedAnswer, ...] = ()
    """Of an evaluation, from the first rank of the replica: what the model answered to some of its samples."""
    read_by_transport: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank read from the pool since its last report, texts included, by transport."""
    is_spike: bool = False
    """The loss stood far above those before it, so that the step made no update."""
    sample_losses: tuple[SampleLoss, ...] = ()
    """Of the samples of a training step whose loss this rank computed; empty if all samples are of one source."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """Where a run's flow starts. It also needs the configuration and the model's shape."""

    global_batch_size: int
    """Positions of a step."""
    dp_size: int
    """Data parallel replicas of the backbone."""
    num_steps: int
    """Steps of the whole run."""
    total_positions: int | None
    """Training positions of the whole run; None if ``num_steps`` alone ends it."""
    start_step: int
    """Steps that earlier runs have done."""
    sampler_state: SamplerState
    """Where the order of samples stands after ``start_step``."""
    cost: CostModel
    """Cost of a microbatch, with which steps are planned."""
    num_rejected: int
    """Training samples rejected so far."""
    num_seen: int
    """Training samples sized or rejected so far."""
    num_feeders: int = 1
    """Processes that read and size the samples."""
    evaluations: tuple[EvalRounds, ...] = ()
    """Of each held-out set, in the order of the configuration."""
    last_traced_step: int = 0
    """Spans and counters are kept until it is done."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to a pool process that joins. Only feeders need more than their index."""

    process_index: int
    """Place in the address space. An index is never used again in a run."""
    sampler_state: SamplerState | None = None
    """State after the last unit that the feeder's predecessor reported; the new feeder continues there."""


@dataclass(frozen=True, slots=True)
class FeedReport:
    """A feeder's report: its samples of one unit or none, and parts that it produced again."""

    unit: Unit | None = None
    """The unit; None: nothing was sized, the feeder only asks for work."""
    sized: tuple[SizedSample, ...] = ()
    """The feeder's samples of the unit, without rejected ones."""
    texts: tuple[PartReady, ...] = ()
    """texts[i] is the READY text part of sized[i]."""
    images: tuple[PartReady, ...] = ()
    """The READY image parts of those samples that have images, in the order of ``sized``."""
    rejections: tuple[Rejection, ...] = ()
    """The feeder's samples of the unit that cannot be used."""
    sampler_state: SamplerState | None = None
    """State after ``unit``; None without a unit."""
    remade: tuple[PartReady, ...] = ()
    """Lost parts, produced again."""
    stats: PoolStats | None = None
    """Occupancy of the feeder's segment; None in the first report."""
    spans: tuple[Span, ...] = ()
    """New spans for the trace."""
    num_retries: int = 0
    """Reads of storage that it tried again since its last report."""


@message
class Remake:
    """Parts of a sample that were lost with their feeder, to be produced again."""

    ref: SampleRef
    parts: tuple[str, ...]
    """``TEXT_PART``, ``IMAGES_PART`` or both."""


@dataclass(frozen=True, slots=True)
class FeedOrder:
    """What a feeder does next: free memory, then stop, produce lost parts again, or size its samples of a unit."""

    unit: Unit | None
    """Unit to size, or None."""
    remake: tuple[Remake, ...]
    """Parts that it produces again."""
    released: tuple[Extent, ...]
    """Own extents that it frees first."""
    stop: bool
    """The run is over for the feeder."""
    consumed: tuple[int, ...] = ()
    """Positions of the unit that an earlier run has consumed: feeders draw them but do not size them."""
    starts_at: SamplerState | None = None
    """The run went back: the feeder drops what it has drawn, and draws from this state on. None: it goes on."""


@dataclass(frozen=True, slots=True)
class RoomOrder:
    """What a feeder with a full segment does next: free ``released``, or stop."""

    released: tuple[Extent, ...]
    stop: bool


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """An encoder's report of a lease that it finished."""

    ready: tuple[PartReady, ...] = ()
    """Needed parts that it has put into the pool."""
    rejections: tuple[Rejection, ...] = ()
    """Samples of the batch that cannot be used."""
    stats: PoolStats | None = None
    """Occupancy of its DRAM segment; None: no new values."""
    spans: tuple[Span, ...] = ()
    """New spans for the trace."""
    returned: int | None = None
    """Id of a lease whose images it could not read, since their feeder is gone."""
    lease_id: int = 0
    """Of the lease that it finished; 0: none."""
    read_by_transport: dict[str, int] = field(default_factory=dict)
    """Bytes that it read from the pool since its last report, by transport."""


@dataclass(frozen=True, slots=True)
class HandInReply:
    """The answer to an encoder's report."""

    refused: tuple[Extent, ...]
    """Extents of parts whose lease the encoder no longer holds; it frees them."""


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """What an encoder does next: free ``released``, then encode ``lease``, or stop."""

    lease: Lease | None
    """None: the encoder waits for memory, for the lookahead or for sizes, and asks again."""
    released: tuple[Extent, ...]
    stop: bool


@dataclass(frozen=True, slots=True)
class PlanReply:
    """The plan of a unit, or why there is none."""

    plan: StepPlan | None
    """None: not planned yet, or past the end."""
    is_past_end: bool
    """True: the run ends before this unit."""


@dataclass(frozen=True, slots=True)
class LocateReply:
    """Where microbatches lie, or why not."""

    locations: tuple[MicrobatchLocation, ...]
    """Empty: the first wanted microbatch is not ready yet, or is past the end."""
    is_past_end: bool
    """True: the run ends before this unit."""
