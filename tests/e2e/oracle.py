"""The yardstick: a plain loop over HF's own LlavaForConditionalGeneration, one unpacked sample at a time.

It shares with FlowTrain the initial weights, the order of the samples and their token ids; image processing, vision
tower, merging, attention, loss, gradients and optimizer are HF's and torch's.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn

from flowtrain.config.run import RunConfig
from flowtrain.data.feed import sampler_from_config
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import RawSample
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.samples import Rejection

Tensors = dict[str, torch.Tensor]


@dataclass
class StepOutcome:
    """Loss and gradients of one step, under the names of FlowTrain's backbone; positions that it trained on."""

    loss: float
    gradients: Tensors
    positions: list[int]

    def gradient_norm(self) -> float:
        """Global norm, summed in double precision."""
        return float(torch.stack([gradient.double().norm() for gradient in self.gradients.values()]).norm())


class PlainLoop:
    """Trains as the configuration says, without FlowTrain's flow. rejected: rows that cannot be decoded.

    trains_encoder: the tower too, as far as features depend on it. processing: how HF's processor calls its image
    processor.
    """

    def __init__(
        self,
        config: RunConfig,
        rejected_rows: set[int] | None = None,
        trains_encoder: bool = False,
        processing: dict[str, bool] | None = None,
    ) -> None:
        self.config = config
        self.rejected_rows = rejected_rows or set()
        self.processing = processing or {}
        self.family = family_from_config(config)
        self.model = self.family.load_joined().train()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trains_encoder or not is_of_tower(name))
            if "connector" in config.model.freeze and backbone_name(name).startswith("connector."):
                parameter.requires_grad_(False)
        trained = [(name, tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad]
        self.named = {backbone_name(name): tensor for name, tensor in trained}
        self.optimizer = self._optimizer()
        self.sources = SourceSet.from_config(config.data)
        self.sampler = sampler_from_config(config, [source.index.first_rows for source in self.sources.train])
        self.sizer = Sizer(self.family, self.family.tokenizer, config.data)

    def _optimizer(self) -> torch.optim.Optimizer:
        training = self.config.training
        # No weight decay in these tests, so parameter groups do not matter.
        assert training.weight_decay == 0 and training.lr_schedule == "constant" and training.warmup_steps == 0
        if training.optimizer == "sgd":
            return torch.optim.SGD(self.named.values(), lr=training.learning_rate)
        return torch.optim.AdamW(
            self.named.values(), training.learning_rate, training.betas, training.eps, weight_decay=0.0
        )

    def step(self) -> StepOutcome:
        """Train on the next global batch."""
        samples = []
        for ref, _ in self.sampler.take(self.config.training.global_batch_size):
            if ref.row in self.rejected_rows:
                continue
            raw = self.sources.read(ref)
            loaded = self.sizer.load(ref, raw)
            if isinstance(loaded, Rejection):
                continue
            sized = self.sizer.size(ref, loaded.measured)
            if isinstance(sized, SizedResult):
                samples.append((sized, raw))
        by_token = self.config.training.loss_normalization == "token"
        denominator = sum(sized.sample.num_target_tokens for sized, _ in samples) if by_token else len(samples)
        loss = 0.0
        for sized, raw in samples:
            mean = self._mean_loss(sized, raw)
            weight = sized.sample.num_target_tokens / denominator if by_token else 1 / denominator
            (mean * weight).backward()
            loss += float(mean.detach()) * weight
        # Where no sample of a step reaches a parameter, FlowTrain's gradient is zero and a plain loop's is None.
        for parameter in self.named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {name: parameter.grad.clone() for name, parameter in self.named.items()}
        if self.config.training.max_grad_norm:
            nn.utils.clip_grad_norm_(self.named.values(), self.config.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepOutcome(loss, gradients, [sized.sample.position for sized, _ in samples])

    def weights(self) -> Tensors:
        """The trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}

    def _mean_loss(self, sized: SizedResult, raw: RawSample) -> torch.Tensor:
        ids, labels = (torch.from_numpy(row.astype(np.int64))[None] for row in sized.text[:2])
        encoded = [image.read(self.config.data.max_image_nbytes) for image in raw.images]
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in encoded]
        inputs: Tensors = {}
        if images:
            processed = self.family.image_processor(images, return_tensors="pt", **self.processing)
            inputs = {name: processed[name] for name in ("pixel_values", "image_grid_thw") if name in processed}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == self.family.image_token_id).int()
        return self.model(
            input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids), use_cache=False, **inputs
        ).loss


def is_of_tower(hf_name: str) -> bool:
    """Whether a parameter of HF's class of the whole model is the encoder's."""
    return "vision_tower" in hf_name or (hf_name.startswith("model.visual.") and "merger" not in hf_name)


def backbone_name(hf_name: str) -> str:
    """FlowTrain's name of a parameter of HF's class of the whole model."""
    for theirs, ours in (
        ("model.multi_modal_projector.", "connector."),
        ("model.visual.merger.", "connector.merger."),
        ("model.visual.deepstack_merger_list.", "connector.deepstack_merger_list."),
        ("model.visual.", "encoders.vision.tower."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if hf_name.startswith(theirs):
            return ours + hf_name.removeprefix(theirs)
    return hf_name


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of the yardstick; the plain norm where the yardstick is zero."""
    scale = float(theirs.norm())
    difference = float((ours - theirs).norm())
    return difference / scale if scale > 0 else difference
