"""TRL's SFTTrainer as its users run it for vision-language models, with its own collator; see ``_peer_job.py``.

It pads: TRL packs no samples with images. Gradient checkpointing, which TRL turns on by default, is off, as it is in
FlowTrain's runs. Loss is on the assistant's tokens, divided by those of the whole step, over all processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
import trl
from _hf_samples import Samples
from _peer_hf_trainer import Clock, InOrder, train, trainer_settings
from _peer_job import load_model, read_job
from datasets import Dataset, Features, Image, List, Value
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer

MESSAGE = {"role": Value("string"), "content": Value("string")}


def conversations(samples: Path) -> Dataset:
    """Images and messages; TRL puts a message's images before its text, as the samples have them."""
    rows = pq.read_table(samples).to_pylist()
    return Dataset.from_dict(
        {
            "images": [row["images"] for row in rows],
            "messages": [
                [
                    {"role": "user", "content": row["texts"][0]["user"].replace("<image>", "")},
                    {"role": "assistant", "content": row["texts"][0]["assistant"]},
                ]
                for row in rows
            ],
        },
        features=Features(images=List(Image(mode="RGB")), messages=List(MESSAGE)),
    )


class InOrderSFTTrainer(InOrder, SFTTrainer):
    """See ``InOrder``."""


def main() -> None:
    job, clock = read_job(), Clock()
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as directory:
        trainer = InOrderSFTTrainer(
            model=load_model(job.model),
            args=SFTConfig(**trainer_settings(job, directory), max_length=None, assistant_only_loss=True),
            train_dataset=conversations(job.samples),
            processing_class=AutoProcessor.from_pretrained(job.model),
            callbacks=[clock],
        )
        trainer.lengths = Samples(job.samples, job.model).lengths()
        train(trainer, clock, trl.__version__)


if __name__ == "__main__":
    main()
