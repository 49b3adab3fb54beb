"""HF Trainer with a padded collator on ``LlavaForConditionalGeneration``, as its users run it; see ``_peer_job.py``.

With several processes ``torch.distributed.run`` starts it. Steps have the samples in their order, so that losses can be
compared; within a step they may be sorted by Trainer's own ``batch_rebalance``.
The Trainer divides the sum of a microbatch's losses by the target tokens of the whole step, over all processes.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import transformers
from _hf_samples import Samples, pad_with_pixels
from _peer_job import BETAS, MAX_GRAD_NORM, PeerJob, answer, load_model, read_job
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler


class Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended_s.append(time.time())


def trainer_settings(job: PeerJob, directory: str) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` that both trainers share."""
    beta1, beta2 = BETAS
    distributed = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False} if job.processes > 1 else {}
    return {
        "output_dir": directory,
        "per_device_train_batch_size": job.size,
        "gradient_accumulation_steps": job.microbatches,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "train_sampling_strategy": "batch_rebalance" if job.balanced else "sequential",
        "dataloader_num_workers": job.workers,
        "dataloader_persistent_workers": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **distributed,
    }


class InOrder(Trainer):
    """Trainer whose ``batch_rebalance`` does not shuffle, and knows the lengths without reading the data.

    lengths: set before training.
    """

    lengths: list[int]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "batch_rebalance":
            return super()._get_train_sampler(train_dataset)
        args, processes = self.args, self.args.world_size
        return BatchRebalanceSampler(
            self.lengths,
            effective_batch_size=args.train_batch_size * args.gradient_accumulation_steps * processes,
            dp_size=processes,
            grad_accum=args.gradient_accumulation_steps,
            shuffle=False,
            rank=args.process_index,
        )


def train(trainer: Trainer, clock: Clock, version: str) -> None:
    """Train; the first process prints what was measured."""
    trainer.train()
    if trainer.is_world_process_zero():
        answer(clock.ended_s, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], version)


def main() -> None:
    job, clock = read_job(), Clock()
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as directory:
        samples = Samples(job.samples, job.model)
        trainer = InOrder(
            model=load_model(job.model),
            args=TrainingArguments(**trainer_settings(job, directory), remove_unused_columns=False),
            data_collator=pad_with_pixels,
            train_dataset=samples,
            callbacks=[clock],
        )
        trainer.lengths = samples.lengths()
        train(trainer, clock, transformers.__version__)


if __name__ == "__main__":
    main()
