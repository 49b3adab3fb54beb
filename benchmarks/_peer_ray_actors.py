"""Actors of ``_peer_ray_data.py``: the vision tower of Ray Data's pool, and the training processes.

They lie in a module of their own so that Ray passes them by name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import torch
import torch.distributed as dist
from _hf_samples import Batch, RowReader, pad
from _peer_job import BETAS, MAX_GRAD_NORM, PeerJob, load_model
from torch.nn.parallel import DistributedDataParallel

from flowtrain.data.conversation import IGNORE_LABEL

BLOCK_ROWS = 12
"""Rows that the encoder hands over together: few, so that training begins soon."""
KEYS = ("features", "input_ids", "labels")
PREFETCHED = 4
"""Microbatches that the loop asks for ahead."""


class TowerActor:
    """The vision tower in an actor of Ray Data's pool: rows to features, token ids and labels."""

    def __init__(self, job: PeerJob) -> None:
        torch.set_num_threads(job.threads)
        model = load_model(job.model).eval().model
        self._config, self._tower = model.config, model.vision_tower
        self._reader = RowReader(job.model)
        row = pq.read_table(job.samples).slice(0, 1).to_pylist()[0]
        self({"images": [row["images"]], "texts": [row["texts"]]})

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        """Features of a sample: ``[images * tokens, hidden]``, before the projector. began_s: when this call began."""
        began_s = time.time()
        pairs = zip(rows["images"], rows["texts"], strict=True)
        samples = [self._reader.read({"images": images, "texts": texts}) for images, texts in pairs]
        with torch.inference_mode():
            found = self._encode(torch.cat([sample["pixel_values"] for sample in samples]))
        parts = found.split([len(sample["pixel_values"]) for sample in samples])
        return {
            "features": _ragged([part.flatten(0, 1).numpy() for part in parts]),
            **{key: _ragged([sample[key].numpy() for sample in samples]) for key in ("input_ids", "labels")},
            "began_s": np.full(len(samples), began_s),
        }

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self._tower(pixels, output_hidden_states=True).hidden_states[self._config.vision_feature_layer]
        return hidden[:, 1:] if self._config.vision_feature_select_strategy == "default" else hidden


def _ragged(arrays: list[np.ndarray]) -> np.ndarray:
    found = np.empty(len(arrays), dtype=object)
    found[:] = arrays
    return found


class FeatureModel(torch.nn.Module):
    """Projector and language model on features; its vision tower is gone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        del model.model.vision_tower
        self._model = model

    def forward(self, batch: Batch, num_targets: int) -> torch.Tensor:
        """The sum of losses over ``num_targets``."""
        ids, features = batch["input_ids"], batch["features"]
        embeds = self._model.get_input_embeddings()(ids)
        is_image = (ids == self._model.config.image_token_id)[..., None]
        embeds = embeds.masked_scatter(is_image, self._model.model.multi_modal_projector(features))
        hidden = self._model.model.language_model(
            inputs_embeds=embeds, attention_mask=batch["attention_mask"], use_cache=False
        ).last_hidden_state
        logits, vocab = self._model.lm_head(hidden), self._model.config.text_config.vocab_size
        loss: torch.Tensor = self._model.loss_function(
            logits, batch["labels"], vocab_size=vocab, num_items_in_batch=num_targets
        )
        return loss


class Trainer:
    """One training process."""

    def __init__(self, job: PeerJob, rank: int, port: int) -> None:
        self._job, self._rank, self._port = job, rank, port
        self._began_s = math.inf
        torch.set_num_threads(job.threads)

    def train(self, samples: str) -> tuple[list[float], list[float], float]:
        """Train on a file of this process's samples.

        Returns the end of each step, its loss over all processes, and when its encoder began.
        """
        job = self._job
        if job.processes > 1:
            where = f"tcp://127.0.0.1:{self._port}"
            dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=job.processes)
        loaded = load_model(job.model)
        self._feature_size = loaded.config.vision_config.hidden_size
        model: torch.nn.Module = FeatureModel(loaded)
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=job.learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
        if job.processes > 1:
            model = DistributedDataParallel(model)
        self._warm_up(model)
        optimizer.zero_grad(set_to_none=True)
        ended_s, losses = [], []
        batches = self._microbatches(samples)
        for _ in range(job.steps):
            losses.append(self._step(model, [next(batches) for _ in range(job.microbatches)]))
            torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ended_s.append(time.time())
        return ended_s, losses, self._began_s

    def _warm_up(self, model: torch.nn.Module) -> None:
        """Forward and backward of a text, which changes no weights."""
        ids = torch.ones(self._job.size, 128, dtype=torch.long)
        features = torch.zeros(0, self._feature_size)
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "features": features}
        model(batch, ids.numel()).backward()

    def _step(self, model: torch.nn.Module, batches: list[Batch]) -> float:
        targets = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORE_LABEL).sum()) for batch in batches))
        if self._job.processes > 1:
            dist.all_reduce(targets)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = index == len(batches) - 1
            loss = model(batch, int(targets))
            (loss * self._job.processes).backward()  # the gradients of several processes are averaged
            total += loss.detach()
        if self._job.processes > 1:
            dist.all_reduce(total)
        return total.item()

    def _microbatches(self, samples: str) -> Iterator[Batch]:
        """Padded microbatches of encoded samples, in their order."""
        job = self._job
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        table = pq.read_table(samples)
        rows = ray.data.from_arrow([table.slice(at, BLOCK_ROWS) for at in range(0, len(table), BLOCK_ROWS)])
        encoded = rows.map_batches(
            TowerActor,
            fn_constructor_args=(job,),
            batch_size=job.size,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=1,
        )
        for batch in encoded.iter_batches(batch_size=job.size, prefetch_batches=PREFETCHED, batch_format="numpy"):
            self._began_s = min(self._began_s, float(batch["began_s"].min()))
            columns = [batch[key] for key in KEYS]
            found = [
                {key: torch.tensor(value) for key, value in zip(KEYS, values, strict=True)}
                for values in zip(*columns, strict=True)
            ]
            yield {**pad(found), "features": torch.cat([each["features"] for each in found])}
