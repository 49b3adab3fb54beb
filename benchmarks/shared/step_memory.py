"""Peak memory of a training step on ranks of a gloo group, counted tensor by tensor, and its prediction."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.shared.text_source import TextSource
from flowtrain.config.run import RunConfig
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.memory import StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ConnectorSpec
from flowtrain.costs.training_setup import Chunk, MicrobatchSize, TrainingSetup
from flowtrain.models.activation_offload import store_for
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.initial_weights import BuiltWeights
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import PackedBatch, SampleArrays, build_batch
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from shared.memory_trace import LivePeak, held_by

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
NUM_SAMPLES, SAMPLE_TOKENS, SAMPLE_ROWS = 4, 128, 32


@dataclass(frozen=True)
class Case:
    """One configuration of four ranks. backbone: keys of the configuration's section."""

    name: str
    degrees: Degrees
    backbone: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    num_microbatches: int = 2

    def config(self) -> RunConfig:
        """Return the configuration of a run with it; its paths are not used."""
        return RunConfig.model_validate(
            {
                "name": "memory",
                "model": {"dtype": self.dtype},
                "encoders": {"vision": {"path": "unused"}},
                "backbone": {"path": "unused", **self.backbone},
                "data": {"sources": [{"path": "unused"}]},
                "training": {"max_steps": 10, "global_batch_size": 64},
            }
        )

    def predicted(self) -> StepMemory:
        """Return the cost model's prediction."""
        backbone, degrees = self.config().backbone, self.degrees
        spec = from_hf_text_config(Qwen3Config(**SHAPE).to_dict())
        assert backbone.gradient_reduction != "auto", "only a run decides that"
        setup = TrainingSetup(
            dp=degrees.dp,
            tp=degrees.tp,
            dtype=self.dtype,  # type: ignore[arg-type]  # one of the configuration's
            sharding=backbone.sharding,
            shard_size=backbone.hybrid_shard_size,
            gradient_reduction=backbone.gradient_reduction,
            sequence_parallel=backbone.sequence_parallel,
            activation_checkpointing=backbone.activation_checkpointing,
            checkpoint_every=backbone.checkpoint_every,
            attention="sdpa",
            accumulates=self.num_microbatches > 1,
        )
        connector = ConnectorSpec(FEATURE_DIM, spec.hidden_size, spec.hidden_size)
        batch = _batch(self.dtype)
        size = MicrobatchSize(batch.num_tokens, batch.num_target_tokens, len(batch.feature_index))
        return predict_step_memory(spec, connector, (Chunk(spec.num_layers),), setup, size)


_EACH, _ONCE = {"gradient_reduction": "microbatch"}, {"gradient_reduction": "step"}
_HYBRID = {"sharding": "hybrid", "hybrid_shard_size": 2}
_WHOLE = {"sequence_parallel": False}
CASES = {
    case.name: case
    for case in (
        Case("step", Degrees(dp=4), _ONCE),
        Case("microbatch", Degrees(dp=4), _EACH),
        Case("hybrid step", Degrees(dp=4), _ONCE | _HYBRID),
        Case("hybrid microbatch", Degrees(dp=4), _EACH | _HYBRID),
        Case("recomputed", Degrees(dp=4), _EACH | {"activation_checkpointing": "full"}),
        Case("offloaded", Degrees(dp=4), _EACH | {"activation_checkpointing": "offload"}),
        Case("tp 2", Degrees(dp=2, tp=2), _EACH),
        Case("tp 2, tokens whole", Degrees(dp=2, tp=2), _EACH | _WHOLE),
        Case("tp 4", Degrees(tp=4), _ONCE),
        Case("tp 4, tokens whole", Degrees(tp=4), _ONCE | _WHOLE),
        Case("tp 2, selective", Degrees(dp=2, tp=2), _EACH | {"activation_checkpointing": "selective"}),
        Case("tp 2, offloaded", Degrees(dp=2, tp=2), _EACH | {"activation_checkpointing": "offload"}),
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
    trainer = Trainer(case.config(), _Source(), group, num_steps=10)

    def step(number: int) -> None:
        execute(trainer.begin_unit(_plan(case, number)), trainer.stages, lambda _: _batch(case.dtype))
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

    def backbone_skeleton(self) -> Backbone:
        with torch.device("meta"):
            return self._backbone()

    def backbone_weights(self) -> BuiltWeights:
        return BuiltWeights(self._backbone)

    def _backbone(self) -> Backbone:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), attn_implementation=implementation_name("sdpa"))
        return Backbone(Connector(FEATURE_DIM, SHAPE["hidden_size"]), model)


def _batch(dtype: str) -> PackedBatch:
    return build_batch(
        [_sample(position) for position in range(NUM_SAMPLES)],
        image_token_id=IMAGE_TOKEN,
        feature_dim=FEATURE_DIM,
        dtype=getattr(torch, dtype),
        loss_normalization="token",
        device=CPU,
    )


def _sample(position: int) -> SampleArrays:
    rng = np.random.default_rng(position)
    text = rng.integers(4, SHAPE["vocab_size"], size=SAMPLE_TOKENS - SAMPLE_ROWS)
    ids = np.concatenate([np.full(SAMPLE_ROWS, IMAGE_TOKEN), text])
    labels = np.where(np.arange(ids.size) > ids.size // 2, ids, -100)
    features = torch.from_numpy(rng.standard_normal((SAMPLE_ROWS, FEATURE_DIM)).astype(np.float32))
    return SampleArrays(position, np.stack([ids, labels]).astype(np.int32), features)


def _plan(case: Case, step: int) -> StepPlan:
    num_targets = _batch(case.dtype).num_target_tokens // NUM_SAMPLES
    samples = tuple(PlannedSample(at, SAMPLE_TOKENS, SAMPLE_ROWS, num_targets) for at in range(NUM_SAMPLES))
    rows = tuple(
        tuple(Microbatch(slot, rank, samples, 1.0) for rank in range(case.degrees.dp))
        for slot in range(case.num_microbatches)
    )
    num_samples = NUM_SAMPLES * case.degrees.dp * case.num_microbatches
    unit = Unit(step, UnitKind.TRAIN, step, 0, num_samples)
    return StepPlan.of_slots(unit, NUM_SAMPLES * SAMPLE_TOKENS, rows, ())
