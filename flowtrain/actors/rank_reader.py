"""What a backbone rank reads, by the run's mode and the rank's place in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flowtrain.actors.decoding import ImageReader
from flowtrain.actors.reading import MicrobatchReader
from flowtrain.actors.spans import SpanLog
from flowtrain.config.run import RunConfig
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.models.families.base import Family
from flowtrain.training.batch import pack_texts
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import BackboneGroup


def reads_pool(config: RunConfig, model: ModelChunks, group: BackboneGroup) -> bool:
    """Whether a rank reads features or images. The replica's leader reads texts in every mode."""
    is_leader = group.pp_rank == group.tp_rank == 0
    return is_leader or (group.pp_rank == model.partition.entry_rank and config.mode != "llm_only")


def build_reader(
    config: RunConfig,
    family: Family,
    group: BackboneGroup,
    model: ModelChunks,
    pool: Pool | None,
    spans: SpanLog,
    staging: DeviceStaging | None = None,
    image_reader: Callable[[Pool], ImageReader] | None = None,
) -> MicrobatchReader:
    """Return what reads and assembles a rank's microbatches. pool: None unless ``reads_pool``.

    staging, image_reader: replace the usual ones (emulated devices).
    """
    name, device = family.encoder_names[0], group.device
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    partition, tower = model.partition, model.encoder
    images = None
    if tower is not None and group.pp_rank == partition.entry_rank:
        assert pool is not None
        if image_reader is not None:
            images = image_reader(pool)
        else:
            preprocess = partial(family.preprocess, name)
            images = ImageReader(pool, preprocess, config.data.max_image_pixels, config.encoders[name].decode_threads)
    return MicrobatchReader(
        dp_rank=group.dp_rank,
        pool=pool,
        pack=partial(
            pack_texts,
            image_token_id=family.image_token_id,
            feature_dim=family.pooled_dim(name),
            dtype=dtype,
            loss_normalization=config.training.loss_normalization,
            device=device,
            with_features=group.pp_rank == partition.token_rank and config.mode != "llm_only",
        ),
        feature_dim=family.pooled_dim(name),
        feature_dtype=dtype,
        spans=spans,
        tp_rank=group.tp_rank,
        tp_size=group.degrees.tp,
        staging=DeviceStaging(pool, device) if device.type != "cpu" else staging,
        exchange=group.exchange,
        rows_of=tower.shape.num_rows if tower is not None else None,
        images=images,
    )
