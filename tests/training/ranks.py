"""Helpers of these tests: tiny models, samples and plans, and functions that run in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from flowtrain.config.run import RunConfig
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.freezing import freeze_parameters
from flowtrain.models.initial_weights import BuiltWeights
from flowtrain.models.vision_stage import VisionStage
from flowtrain.pipeline.actions import Schedule, StageModule, schedule_text
from flowtrain.pipeline.executor import execute
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.search.early import early_schedule
from flowtrain.search.one_f_one_b import IN_TIME, step_s
from flowtrain.search.works import SlotTimes
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleArrays, SampleText, build_batch, pack_texts
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import BackboneGroup, device_mesh, init_backbone_group, open_listener
from flowtrain.training.saver import CheckpointSaver
from flowtrain.training.trainer import StepResult, Trainer
from flowtrain.types.plan import Degrees, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from tests.models.operators import Operators
from tests.pipeline.random_schedules import random_schedule, shuffle_legally
from tests.training.towers import (
    COMPUTED_LAYERS,
    FEATURE_DIM,
    computed_names,
    make_images,
    make_tower,
    plain_features,
    tower_config,
    tower_stage,
)

IMAGE_TOKEN, VOCAB = 3, 32
CPU = torch.device("cpu")


def make_config(**sections: Any) -> RunConfig:
    """A valid configuration; the models of these tests are built by `TinyFamily`, whatever it says of paths."""
    defaults: dict[str, Any] = {
        "name": "test",
        "encoders": {"vision": {"path": "unused"}},
        "backbone": {"path": "unused"},
        "data": {"sources": [{"path": "unused"}]},
    }
    training = {"max_steps": 10, "global_batch_size": 8, "learning_rate": 1e-2, "lr_schedule": "constant"}
    training |= sections.pop("training", {})
    return RunConfig.model_validate({**defaults, **sections, "training": training})


@dataclass(frozen=True)
class TinyFamily:
    """Qwen3 of two layers, a connector and a tower of which three layers are computed, seeded.

    freeze: as ``model.freeze``. compile_with: torch.compile's backend; none: not compiled. trains_tower: as
    ``encoders.vision.trainable``.
    """

    freeze: tuple[str, ...] = ()
    tied: bool = True
    hidden_size: int = 16
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    compile_with: str | None = None
    seed: int = 11
    tower: str = "dinov2"
    trains_tower: bool = False

    @property
    def model_spec(self) -> ModelSpec:
        vision = from_hf_vision_config(tower_config(self.tower).to_dict())
        with torch.device("meta"):
            backbone = from_hf_text_config(self.load_backbone().language_model.config.to_dict())
        connector = ConnectorSpec(FEATURE_DIM, self.hidden_size, self.hidden_size)
        return ModelSpec({"vision": replace(vision, num_layers=COMPUTED_LAYERS)}, connector, backbone)

    def encoder_skeleton(self, encoder: str) -> VisionStage:
        with torch.device("meta"):
            return tower_stage(self.tower, trainable=self.trains_tower)

    def encoder_weights(self, encoder: str) -> BuiltWeights:
        return BuiltWeights(lambda: tower_stage(self.tower))

    def backbone_skeleton(self) -> Backbone:
        with torch.device("meta"):
            skeleton = self.load_backbone()
        if self.compile_with is not None:
            skeleton.compile_layers(self.compile_with)
        return skeleton

    def backbone_weights(self) -> BuiltWeights:
        return BuiltWeights(self.load_backbone)

    def load_backbone(self) -> Backbone:
        torch.manual_seed(self.seed)
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=self.hidden_size,
            intermediate_size=24,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=8,
            tie_word_embeddings=self.tied,
            initializer_range=0.2,
        )
        language_model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation_name("sdpa"))
        backbone = Backbone(Connector(FEATURE_DIM, self.hidden_size), language_model)
        freeze_parameters(backbone, self.freeze)
        return backbone


def make_sample(position: int) -> SampleArrays:
    """Lengths, image rows and targets all differ between positions; every fourth sample has no image."""
    rng = np.random.default_rng(position)
    num_rows, num_text = (0 if position % 4 == 3 else int(rng.integers(1, 4))), int(rng.integers(4, 14))
    text = rng.integers(4, VOCAB, size=num_text)
    ids = np.concatenate([text[:2], np.full(num_rows, IMAGE_TOKEN), text[2:]])
    labels = np.where(np.arange(ids.size) > ids.size // 2, ids, -100)
    features = torch.from_numpy(rng.standard_normal((num_rows, FEATURE_DIM)).astype(np.float32)) if num_rows else None
    return SampleArrays(position, np.stack([ids, labels]).astype(np.int32), features)


def planned_sample(position: int) -> PlannedSample:
    text = make_sample(position).text
    vision_tokens = int((text[0] == IMAGE_TOKEN).sum())
    return PlannedSample(position, text.shape[1], vision_tokens, int((text[1, 1:] != -100).sum()))


Slots = Sequence[Sequence[Sequence[int]]]
"""``slots[k][rank]``: positions."""


def make_plan(slots: Slots, step: int, kind: UnitKind = UnitKind.TRAIN) -> StepPlan:
    rows = tuple(
        tuple(
            Microbatch(k, rank, tuple(planned_sample(p) for p in positions), 1.0) for rank, positions in enumerate(row)
        )
        for k, row in enumerate(slots)
    )
    num_samples = sum(len(microbatch.samples) for row in rows for microbatch in row)
    return StepPlan.of_slots(Unit(step, kind, step, 0, num_samples), 256, rows, ())


def make_batch(positions: Sequence[int], config: RunConfig, *, with_pixels: bool = True) -> PackedBatch:
    """With features, or with images for an encoder in the pipeline. with_pixels: False for ranks without its entry."""
    samples = [make_sample(position) for position in positions]
    build: Any = build_batch
    if config.mode == "monolithic":
        samples = [SampleText(s.position, s.text, 0 if s.features is None else len(s.features)) for s in samples]
        build = pack_texts
    batch = build(
        samples,
        image_token_id=IMAGE_TOKEN,
        feature_dim=FEATURE_DIM,
        dtype=getattr(torch, config.model.dtype),
        loss_normalization=config.training.loss_normalization,
        device=CPU,
    )
    if config.mode != "monolithic":
        return batch
    images = [image for s in samples for image in make_images(s.position, s.num_rows)]
    sizes = tuple((image.shape[1], image.shape[2]) for image in images)
    return replace(batch, images=ImageBatch(sizes, tuple(images) if with_pixels else ()))


# --- what a rank does ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Some training steps of one rank, from a checkpoint or from the start, and what happens after them.

    schedule_seed: the plans carry random legal action lists.
    encodes_ahead: they carry lists that have the first rank encode as early as it can.
    save_after: the step after which ``save_to`` is written, beside the later ones; None: after all.
    """

    config: RunConfig
    steps: Sequence[Slots]
    family: TinyFamily = TinyFamily()
    first_step: int = 1
    rejected: frozenset[int] = frozenset()
    eval_slots: Slots | None = None
    load_from: Path | None = None
    save_to: Path | None = None
    save_after: int | None = None
    schedule_seed: int | None = None
    encodes_ahead: bool = False
    counts_operators: bool = False


@dataclass
class Outcome:
    """Results of a job: one `StepResult` and one mapping of full gradients a step, and the weights at the end."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    spans: list[str] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    """How often the training steps called each (``c10d::allreduce_``), if the job counts them."""
    listening: set[str] = field(default_factory=set)


def run_job(rank: int, degrees: Degrees, host: str, port: int, listener: Any, job: Job) -> Outcome:
    """Body of one rank's process."""
    (outcome,) = run_jobs(rank, degrees, host, port, listener, [job])
    return outcome


def run_jobs(rank: int, degrees: Degrees, host: str, port: int, listener: Any, jobs: Sequence[Job]) -> list[Outcome]:
    """Body of one rank's process: the jobs in turn, each with a model of its own."""
    group = init_backbone_group(
        rank, degrees, CPU, host=host, port=port, listener=listener, start_timeout_s=300, collective_timeout_s=300
    )
    shard_sizes = [job.config.backbone.hybrid_shard_size for job in jobs]
    meshes = {size: device_mesh(degrees, CPU, size) for size in dict.fromkeys(shard_sizes)}
    outcomes = [_run_job(replace(group, mesh=meshes[size]), job) for size, job in zip(shard_sizes, jobs, strict=True)]
    group.close()
    return outcomes


def _run_job(group: BackboneGroup, job: Job) -> Outcome:
    outcome = Outcome()
    trainer = Trainer(
        job.config,
        job.family,
        group,
        num_steps=10,
        record=lambda name, start_s, end_s, **args: outcome.spans.append(name),
        before_optimizer=lambda model: outcome.gradients.append(full_values(model, gradients=True)),
        resume_from=job.load_from,
    )
    outcome.listening = listening_addresses()
    for step, slots in enumerate(job.steps, start=job.first_step):
        with Operators() if job.counts_operators else nullcontext() as operators:
            outcome.results.append(run_unit(trainer, job, make_plan(slots, step)))
        if operators is not None:
            outcome.operators += operators.counts
        if step == job.save_after:
            assert job.save_to is not None
            saver = _saver(trainer)
            saver.save(step, job.save_to)
    if job.eval_slots is not None:
        outcome.results.append(run_unit(trainer, job, make_plan(job.eval_slots, 1, UnitKind.EVAL)))
    outcome.weights = full_values(trainer.model, gradients=False)
    if job.save_after is not None:
        assert saver.wait() is None
    elif job.save_to is not None:
        trainer.save_checkpoint(job.save_to)
    return outcome


def _saver(trainer: Trainer) -> CheckpointSaver:
    return CheckpointSaver(
        trainer.group,
        trainer.snapshot,
        trainer.write_snapshot,
        lambda step, directory, problem: None,
        lambda *args, **kwargs: None,
        background=True,
        saved_step=0,
    )


def run_unit(trainer: Trainer, job: Job, plan: StepPlan) -> StepResult:
    """Run a unit of a job's samples."""
    microbatches = [slot[trainer.group.dp_rank] for slot in plan.slots]
    kept = [[s.position for s in m.samples if s.position not in job.rejected] for m in microbatches]
    if (job.schedule_seed is not None or job.encodes_ahead) and plan.unit.kind is UnitKind.TRAIN:
        partition, seed = trainer.model.partition, job.schedule_seed
        chosen = lists_ahead(partition, plan) if seed is None else random_lists(partition, job.config, seed, plan)
        lists = schedule_text(chosen)
        plan = replace(plan, schedules=(lists,) * plan.dp_size).for_replica(trainer.group.dp_rank)
    actions = trainer.begin_unit(plan)
    with_pixels = trainer.group.pp_rank == trainer.model.partition.entry_rank
    execute(actions, trainer.stages, lambda index: make_batch(kept[index], job.config, with_pixels=with_pixels))
    return trainer.finish_unit()


def lists_ahead(partition: Partition, plan: StepPlan) -> Schedule:
    """Those of PipeTune where encoding takes little, and all outputs that wait fit."""
    size, order = plan.num_slots, np.arange(plan.num_slots)
    passes, none = np.ones((partition.pp_size, size)), np.zeros(size)
    times = SlotTimes(passes, 2.0 * passes, np.full(size, 0.1), none)
    early = np.empty(size, dtype=np.int64)
    step_s(order, times.forward, times.backward, times.encode, none, none, 1.0, 1.0, early)
    assert size <= 2 or (early != IN_TIME).any()
    return early_schedule(partition, order, early.tolist(), times)


def random_lists(partition: Partition, config: RunConfig, seed: int, plan: StepPlan) -> Schedule:
    """Of every other step any order that can run, of the others the named schedule's with neighbours exchanged.

    In the first, encoder stages run microbatches in up to three parts, which join in any of them or after them.
    """
    random, size = Random(seed * 1000 + plan.unit.step), plan.num_slots
    if plan.unit.step % 2:
        num_encoder = len(partition.of_module(StageModule.ENCODER))
        parts = [random.randint(1, 3) if num_encoder else 1 for _ in range(size)]
        return random_schedule(random, partition, parts, join_at=random.randint(0, num_encoder))
    lists = build_schedule(config.pipeline.schedule, partition, num_microbatches=size, training=True)
    return shuffle_legally(random, lists, partition, size, num_tries=60)


def listening_addresses() -> set[str]:
    """Hexadecimal addresses (as in /proc/net/tcp) that this process accepts connections at."""
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


def full_values(model: ModelChunks, *, gradients: bool) -> dict[str, np.ndarray]:
    """Whole weights of this rank's chunks, or their gradients, by stored name; collective."""
    full = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None and (parameter.requires_grad or not name.startswith("encoders.")):
            full[model.stored_name(name)] = tensor.full_tensor().numpy().copy()
    return full


# --- processes -------------------------------------------------------------------------------------------------------


def run_ranks(degrees: Degrees | int, job: Any, body: Callable[..., Any] = run_job) -> list[Any]:
    """Run a job in fresh processes; outcomes by rank. A number means that many data parallel ranks."""
    degrees = Degrees(dp=degrees) if isinstance(degrees, int) else degrees
    world_size = degrees.world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.ranks"])
    listener = open_listener() if world_size > 1 else None
    port = 0 if listener is None else listener.getsockname()[1]
    processes, ends = [], []
    for rank in range(world_size):
        end, other_end = context.Pipe(duplex=False)
        arguments = (body, rank, degrees, "127.0.0.1", port, listener if rank == 0 else None, job)
        processes.append(context.Process(target=_send_result, args=(other_end, *arguments)))
        processes[-1].start()
        other_end.close()
        ends.append(end)
    if listener is not None:
        listener.close()
    outcomes = [_receive(end, rank) for rank, end in enumerate(ends)]
    for process in processes:
        process.join()
    return outcomes


def run_jobs_on_ranks(degrees: Degrees | int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    """Run several jobs in the same fresh processes; outcomes by job and rank."""
    return [list(outcomes) for outcomes in zip(*run_ranks(degrees, jobs, run_jobs), strict=True)]


def _send_result(end: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    end.send(function(*arguments))


def _receive(end: Connection, rank: int) -> Any:
    try:
        return end.recv()
    except EOFError as error:
        raise AssertionError(f"rank {rank} died; its traceback is above") from error


# --- the oracle ------------------------------------------------------------------------------------------------------


def run_oracle(job: Job, *, exactly: bool = False) -> Outcome:
    """The same steps on plain parameters: one sample at a time, the loss written out, clipping and AdamW by torch.

    exactly: all in float64.
    """
    torch.set_num_threads(1)
    training, model, outcome = job.config.training, job.family.load_backbone().train(), Outcome()
    tower = make_tower(job.family.tower).train().requires_grad_(job.family.trains_tower)
    named = dict(model.named_parameters())
    if job.family.trains_tower:
        named |= {f"encoders.vision.tower.{name}": tower.get_parameter(name) for name in computed_names(tower)}
    if exactly:
        _compute_in_float64(model)
        tower.double()
    parameters = [parameter for parameter in named.values() if parameter.requires_grad]
    groups = [{"params": [each], "lr": _rate_of(each, model, job.config)} for each in parameters]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=training.learning_rate)
    if training.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, weight_decay=0.0
        )
    for slots in job.steps:
        positions = [p for row in slots for held in row for p in held if p not in job.rejected]
        batches = [make_batch([position], job.config) for position in positions]
        per_token = training.loss_normalization == "token"
        denominator = sum(batch.num_target_tokens for batch in batches) if per_token else len(batches)
        arguments = [batch.forward_kwargs() for batch in batches]
        for kwargs, batch in zip(arguments, batches, strict=True):
            if batch.images is not None and batch.images.pixels:
                images = [image.to(tower.dtype) for image in batch.images.pixels]
                kwargs["features"] = torch.cat([plain_features(tower, image) for image in images])
        loss = torch.stack([model(**kwargs) for kwargs in arguments]).sum() / denominator
        loss.backward()
        for parameter in tower.parameters() if job.family.trains_tower else ():
            if parameter.grad is None:  # a step without images is a step of its optimizer too, as of the connector's
                parameter.grad = torch.zeros_like(parameter)
        gradients = {n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None}
        outcome.gradients.append(gradients)
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        totals = (len(batches), sum(b.num_tokens for b in batches), sum(b.num_target_tokens for b in batches))
        outcome.results.append(StepResult(loss.item(), float(norm), training.learning_rate, *totals))
    outcome.weights = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}
    return outcome


def _compute_in_float64(model: Backbone) -> None:
    """Also in HF's norms, which compute in float32 whatever the type."""
    for module in model.double().modules():
        if isinstance(module, Qwen3RMSNorm):
            shape, eps = module.weight.shape, module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=shape, weight=module.weight, eps=eps)


def _rate_of(parameter: torch.nn.Parameter, model: Backbone, config: RunConfig) -> float:
    """The learning rate by the configuration, of a parameter of whatever names."""
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is parameter]
    given = config.training.learning_rates.model_dump(exclude_none=True)
    rates = [rate for key, rate in given.items() if any(fnmatchcase(name, key) for name in names)]
    begins = {"backbone": "language_model."}
    rates += [rate for key, rate in given.items() if names and names[0].startswith(begins.get(key, f"{key}."))]
    return next(iter(rates), config.training.learning_rate)


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-12))
