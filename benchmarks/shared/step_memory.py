"""Peak memory of a training step on ranks of a gloo group, counted tensor by tensor, and its prediction."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from flowtrain.config.run import RunConfig
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.encoder_memory import EncoderShare
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.memory import StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize
from flowtrain.models.activation_offload import store_for
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.initial_weights import BuiltWeights
from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.executor import execute
from flowtrain.pipeline.rank_chunks import rank_chunks
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleArrays, SampleText, build_batch, pack_texts
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from shared.memory_trace import LivePeak, held_by
from shared.text_source import TextSource

CPU, IMAGE_TOKEN, FEATURE_DIM = torch.device("cpu"), 3, 96
START_TIMEOUT_S = 120
NUM_RANKS = 4
SHAPE: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
TOWER: Mapping[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
IMAGE_ROWS = 16
"""Feature rows of an image in that tower."""
NUM_SAMPLES, SAMPLE_TOKENS = 4, 128


@dataclass(frozen=True)
class Case:
    """One configuration of four ranks. backbone: keys of the configuration's section."""

    name: str
    degrees: Degrees
    backbone: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    num_microbatches: int = 2
    encoder: Mapping[str, Any] | None = None
    """Keys of the encoder in the pipeline (``mode: monolithic``); None: features come from outside."""
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the configuration's section."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Of the backbone, over ``SHAPE``."""

    @property
    def backbone_config(self) -> Qwen3Config:
        """The backbone's configuration of Hugging Face."""
        return Qwen3Config(**{**SHAPE, **self.shape})

    @property
    def sample_rows(self) -> int:
        """Feature rows of a sample."""
        return 32 if self.encoder is None else 6 * IMAGE_ROWS

    @property
    def feature_dim(self) -> int:
        """Width of a feature row."""
        return FEATURE_DIM if self.encoder is None else TOWER["hidden_size"]

    def config(self) -> RunConfig:
        """Return the configuration of a run with it; its paths are not used."""
        return RunConfig.model_validate(
            {
                "name": "memory",
                "mode": "decoupled" if self.encoder is None else "monolithic",
                "model": {"dtype": self.dtype},
                "encoders": {"vision": {"path": "unused", **(self.encoder or {})}},
                "pipeline": self.pipeline,
                "backbone": {"path": "unused", "pipeline_parallel_size": self.degrees.pp, **self.backbone},
                "data": {"sources": [{"path": "unused"}]},
                "training": {"max_steps": 10, "global_batch_size": 64},
            }
        )

    def predicted(self) -> StepMemory:
        """Return the cost model's prediction for the fullest rank."""
        config, degrees = self.config(), self.degrees
        backbone = config.backbone
        assert backbone.gradient_reduction != "auto", "only a run decides that"
        setup = replace(
            configured_setup(config, on_cpu=True),
            dp=degrees.dp,
            tp=degrees.tp,
            accumulates=self.num_microbatches > 1,
        )
        model, batch = _Source(self).model_spec, _batch(self)
        num_rows = len(batch.feature_index)
        size = MicrobatchSize(batch.num_tokens, batch.num_target_tokens, num_rows, num_tower_tokens=num_rows)
        partition = configured_partition(config, model, degrees.pp)
        ranks = [rank_chunks(partition, rank, self.num_microbatches) for rank in range(degrees.pp)]
        shares = [EncoderShare(model.encoders["vision"], held.encoder) for held in ranks]
        predicted = [
            predict_step_memory(model.backbone, model.connector, held.backbone, setup, size, share)
            for held, share in zip(ranks, shares, strict=True)
        ]
        return max(predicted, key=lambda memory: memory.peak)


_EACH, _ONCE = {"gradient_reduction": "microbatch"}, {"gradient_reduction": "step"}
_HYBRID, _GRADIENTS = {"sharding": "hybrid", "hybrid_shard_size": 2}, {"sharding": "gradients"}
_WHOLE = {"sequence_parallel": False}
_WORDS = ["none", "full", "selective", "offload", "full", "none"]
_DTYPE, _OWN = "bfloat16", {"encoder_layers": "own"}
_MIXED = {"encoder_layers": "mixed", "partition": [4, 8]}  # the first rank has nothing but encoder layers
_TRAINED, _RECOMPUTED = {"trainable": True}, _EACH | {"activation_checkpointing": "full"}
_LARGE = {"vocab_size": 32768, "num_hidden_layers": 2}
_TIED = _LARGE | {"tie_word_embeddings": True}
CASES = {
    case.name: case
    for case in (
        Case("step", Degrees(dp=4), _ONCE),
        Case("microbatch", Degrees(dp=4), _EACH),
        Case("hybrid step", Degrees(dp=4), _ONCE | _HYBRID),
        Case("hybrid microbatch", Degrees(dp=4), _EACH | _HYBRID),
        Case("recomputed", Degrees(dp=4), _RECOMPUTED),
        Case("offloaded", Degrees(dp=4), _EACH | {"activation_checkpointing": "offload"}),
        Case("tp 2", Degrees(dp=2, tp=2), _EACH),
        Case("tp 2, tokens whole", Degrees(dp=2, tp=2), _EACH | _WHOLE),
        Case("tp 4", Degrees(tp=4), _ONCE),
        Case("tp 4, tokens whole", Degrees(tp=4), _ONCE | _WHOLE),
        Case("tp 2, selective", Degrees(dp=2, tp=2), _EACH | {"activation_checkpointing": "selective"}),
        Case("tp 2, offloaded", Degrees(dp=2, tp=2), _EACH | {"activation_checkpointing": "offload"}),
        Case("a word for each layer", Degrees(dp=4), _EACH | {"activation_checkpointing": _WORDS}),
        Case("pp 2", Degrees(dp=2, pp=2), _EACH, _DTYPE, 4),
        Case("frozen encoder, recomputed", Degrees(dp=4), _RECOMPUTED, encoder={}),
        Case("trained encoder", Degrees(dp=4), _EACH, encoder=_TRAINED),
        Case("trained encoder, recomputed", Degrees(dp=4), _RECOMPUTED, encoder=_TRAINED),
        Case("trained encoder, tp 2", Degrees(dp=2, tp=2), _EACH, encoder=_TRAINED),
        Case("trained encoder, tp 2, tokens whole", Degrees(dp=2, tp=2), _EACH | _WHOLE, encoder=_TRAINED),
        Case("trained encoder, tp 2, recomputed", Degrees(dp=2, tp=2), _RECOMPUTED, encoder=_TRAINED),
        Case("trained encoder, pp 2, mixed", Degrees(dp=2, pp=2), _EACH, _DTYPE, 4, _TRAINED, _MIXED),
        Case("trained encoder, pp 2, own", Degrees(dp=2, pp=2), _EACH, _DTYPE, 4, _TRAINED, _OWN),
        Case("frozen encoder, pp 2, own", Degrees(dp=2, pp=2), _EACH, _DTYPE, 4, {}, _OWN),
        Case("large vocabulary", Degrees(dp=4), _ONCE, _DTYPE, 3, shape=_LARGE),
        Case("large vocabulary, microbatch", Degrees(dp=4), _EACH, _DTYPE, 3, shape=_LARGE),
        Case("large vocabulary, gathered", Degrees(dp=4), _EACH | _GRADIENTS, _DTYPE, 3, shape=_LARGE),
        Case("large vocabulary, pp 2", Degrees(dp=2, pp=2), _ONCE, _DTYPE, 4, shape=_LARGE),
        Case("large vocabulary, pp 2, microbatch", Degrees(dp=2, pp=2), _EACH, _DTYPE, 4, shape=_LARGE),
        Case("large vocabulary, pp 2, one microbatch", Degrees(dp=2, pp=2), _EACH, _DTYPE, 1, shape=_LARGE),
        Case("large vocabulary, tp 2, microbatch", Degrees(dp=2, tp=2), _EACH, _DTYPE, 3, shape=_LARGE),
        Case("large vocabulary, trained encoder", Degrees(dp=4), _EACH, _DTYPE, 3, _TRAINED, shape=_LARGE),
        Case("large vocabulary, tied", Degrees(dp=4), _ONCE, _DTYPE, 3, shape=_TIED),
        Case("large vocabulary, tied, float32", Degrees(dp=4), _ONCE, "float32", 3, shape=_TIED),
        Case("large vocabulary, tied, one microbatch", Degrees(dp=4), _ONCE, _DTYPE, 1, shape=_TIED),
        Case("large vocabulary, tied, pp 2", Degrees(dp=2, pp=2), _ONCE, _DTYPE, 4, shape=_TIED),
    )
}
"""Each of four ranks, so that they differ in one setting from another."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: tensors on the device at their peak, and offloaded ones at theirs."""

    device: int
    host: int


def measure(cases: Sequence[Case]) -> dict[str, list[Measured]]:
    """Run two steps of each case, the first to create the optimizer's state, and count the second; by name and rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    listeners = [open_listener() for _ in cases]
    work = [(case, listener.getsockname()[1]) for case, listener in zip(cases, listeners, strict=True)]
    processes, ends = [], []
    for rank in range(NUM_RANKS):
        end, other_end = context.Pipe(duplex=False)
        arguments = (other_end, rank, work, listeners if rank == 0 else [None] * len(work))
        processes.append(context.Process(target=_measure_rank, args=arguments))
        processes[-1].start()
        other_end.close()
        ends.append(end)
    for listener in listeners:
        listener.close()
    found: dict[str, list[Measured]] = {case.name: [] for case in cases}
    for case in cases:
        for rank, end in enumerate(ends):
            try:
                found[case.name].append(end.recv())
            except EOFError as error:
                raise AssertionError(f"rank {rank} died at {case.name}; its traceback is above") from error
    for process in processes:
        process.join()
    return found


def _measure_rank(end: Connection, rank: int, work: Sequence[tuple[Case, int]], listeners: Sequence[Any]) -> None:
    for (case, port), listener in zip(work, listeners, strict=True):
        end.send(_measured(rank, case, port, listener))


def _measured(rank: int, case: Case, port: int, listener: Any) -> Measured:
    group = init_backbone_group(
        rank,
        case.degrees,
        CPU,
        port=port,
        listener=listener,
        shard_size=case.backbone.get("hybrid_shard_size"),
        start_timeout_s=START_TIMEOUT_S,
    )
    store_for.cache_clear()  # each case has host memory of its own
    trainer = Trainer(case.config(), _Source(case), group, num_steps=10)

    def step(number: int) -> None:
        execute(trainer.begin_unit(_plan(case, number)), trainer.stages, lambda _: _batch(case))
        trainer.finish_unit()

    parameters = held_by([parameter for _, parameter in trainer.model.named_parameters()])
    with LivePeak() as live:  # from the first step on, since FSDP keeps what it gathers into
        live.counts = False
        step(1)
        live.counts = True
        step(2)
    host = store_for(CPU).host
    group.close()
    return Measured(parameters + live.peak_nbytes - host.bound_nbytes, host.peak_nbytes)


class _Source(TextSource):
    """The trainer's model source."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @property
    def model_spec(self) -> ModelSpec:
        backbone = from_hf_text_config(self._case.backbone_config.to_dict())
        connector = ConnectorSpec(self._case.feature_dim, backbone.hidden_size, backbone.hidden_size)
        return ModelSpec({"vision": from_hf_vision_config(TOWER)}, connector, backbone)

    def encoder_skeleton(self, encoder: str) -> VisionStage:
        with torch.device("meta"):
            return self._tower()

    def encoder_weights(self, encoder: str) -> BuiltWeights:
        return BuiltWeights(self._tower)

    def _tower(self) -> VisionStage:
        config = AutoConfig.for_model(**TOWER)
        trainable = self._case.config().trains_encoders
        return VisionStage(
            tower_class(config)._from_config(config), feature_layer=-1, drop_first=False, trainable=trainable
        )

    def backbone_skeleton(self) -> Backbone:
        with torch.device("meta"):
            return self._backbone()

    def backbone_weights(self) -> BuiltWeights:
        return BuiltWeights(self._backbone)

    def _backbone(self) -> Backbone:
        torch.manual_seed(7)
        config = self._case.backbone_config
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation_name("sdpa"))
        return Backbone(Connector(self._case.feature_dim, SHAPE["hidden_size"]), model)


def _batch(case: Case) -> PackedBatch:
    samples = [_sample(position, case.sample_rows) for position in range(NUM_SAMPLES)]
    dtype = getattr(torch, case.dtype)
    if case.encoder is None:
        return build_batch(
            samples,
            image_token_id=IMAGE_TOKEN,
            feature_dim=FEATURE_DIM,
            dtype=dtype,
            loss_normalization="token",
            device=CPU,
        )
    batch = pack_texts(
        [SampleText(sample.position, sample.text, case.sample_rows) for sample in samples],
        image_token_id=IMAGE_TOKEN,
        feature_dim=case.feature_dim,
        dtype=dtype,
        loss_normalization="token",
        device=CPU,
    )
    side, count = TOWER["image_size"], NUM_SAMPLES * case.sample_rows // IMAGE_ROWS
    return replace(batch, images=ImageBatch(((side, side),) * count, tuple(torch.rand(count, 3, side, side))))


def _sample(position: int, num_rows: int) -> SampleArrays:
    rng = np.random.default_rng(position)
    text = rng.integers(4, SHAPE["vocab_size"], size=SAMPLE_TOKENS - num_rows)
    ids = np.concatenate([np.full(num_rows, IMAGE_TOKEN), text])
    labels = np.where(np.arange(ids.size) > ids.size // 2, ids, -100)
    features = torch.from_numpy(rng.standard_normal((num_rows, FEATURE_DIM)).astype(np.float32))
    return SampleArrays(position, np.stack([ids, labels]).astype(np.int32), features)


def _plan(case: Case, step: int) -> StepPlan:
    num_targets = _batch(case).num_target_tokens // NUM_SAMPLES
    samples = tuple(PlannedSample(at, SAMPLE_TOKENS, case.sample_rows, num_targets) for at in range(NUM_SAMPLES))
    rows = tuple(
        tuple(Microbatch(slot, rank, samples, 1.0) for rank in range(case.degrees.dp))
        for slot in range(case.num_microbatches)
    )
    num_samples = NUM_SAMPLES * case.degrees.dp * case.num_microbatches
    unit = Unit(step, UnitKind.TRAIN, step, 0, num_samples)
    return StepPlan.of_slots(unit, NUM_SAMPLES * SAMPLE_TOKENS, rows, ())
