"""Train the small vision encoder under assets/encoder, which sees the shapes of assets/build_shapes.py.

    python assets/build_encoder.py [--steps N] [--out DIR]

A ViT of HF's class SiglipVisionModel. Linear heads on its last layer, which are thrown away afterwards, learn to name
the whole picture from every single token (kinds, colours, number, arrangement), and the shape that each patch shows.
Pictures are drawn as they are needed; those of assets/shapes are not among them. The last lines are the shares of new
pictures that the heads name rightly. The same seed, machine and number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from build_shapes import COLOURS, KINDS, LAYOUTS, Scene, draw, random_scene
from PIL import Image
from torch import Tensor, nn
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

SEED = 29
SIDE, PATCH = 112, 16
CONFIG = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vision_use_head": False,
}
BATCH, STEPS, WARMUP_STEPS, LEARNING_RATE, WEIGHT_DECAY = 48, 1200, 60, 1.5e-3, 0.03
NUM_TESTED = 512
CLASSES = {
    "kind": len(KINDS),
    "colour": len(COLOURS),
    "other kind": len(KINDS) + 1,
    "other colour": len(COLOURS) + 1,
    "number": 4,
    "arrangement": len(LAYOUTS),
}
"""What is said of a whole picture; of "other" the last class means that all shapes are alike."""
OF_A_PATCH = {"patch's kind": len(KINDS) + 1, "patch's colour": len(COLOURS) + 1}
"""The last class is paper."""
COLOUR_NAMES = list(COLOURS)


@dataclass(frozen=True)
class Batch:
    """pixels: float32 ``[B, 3, SIDE, SIDE]``. whole: int64 ``[B]`` by name. patches: int64 ``[B, tokens]`` by name."""

    pixels: Tensor
    whole: dict[str, Tensor]
    patches: dict[str, Tensor]


def labels_of(scene: Scene) -> dict[str, int]:
    first = scene.shapes[0]
    other = None if scene.layout == "alike" else scene.shapes[1]
    return {
        "kind": KINDS.index(first.kind),
        "colour": COLOUR_NAMES.index(first.colour),
        "other kind": KINDS.index(other.kind) if other else len(KINDS),
        "other colour": COLOUR_NAMES.index(other.colour) if other else len(COLOURS),
        "number": len(scene.shapes) - 1,
        "arrangement": LAYOUTS.index(scene.layout),
    }


def patch_labels(scene: Scene) -> dict[str, np.ndarray]:
    """The shape whose disc covers each patch's middle, row by row."""
    centres = (np.arange(SIDE // PATCH) + 0.5) * PATCH / SIDE
    kinds, colours = (np.full((len(centres), len(centres)), paper) for paper in (len(KINDS), len(COLOURS)))
    for shape in scene.shapes:
        covered = np.hypot(centres[None, :] - shape.x, centres[:, None] - shape.y) < 0.9 * shape.radius
        kinds[covered], colours[covered] = KINDS.index(shape.kind), COLOUR_NAMES.index(shape.colour)
    return {"patch's kind": kinds.ravel(), "patch's colour": colours.ravel()}


def new_batch(rng: random.Random, size: int) -> Batch:
    scenes = [random_scene(rng) for _ in range(size)]
    images = [draw(scene).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for scene in scenes]
    pixels = torch.from_numpy(np.stack([np.asarray(image, dtype=np.float32) for image in images]))
    whole, patches = [labels_of(scene) for scene in scenes], [patch_labels(scene) for scene in scenes]
    return Batch(
        (pixels / 127.5 - 1).permute(0, 3, 1, 2).contiguous(),
        {name: torch.tensor([each[name] for each in whole]) for name in CLASSES},
        {name: torch.from_numpy(np.stack([each[name] for each in patches])) for name in OF_A_PATCH},
    )


class Supervised(nn.Module):
    """The encoder with its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SiglipVisionModel(SiglipVisionConfig(**CONFIG))
        self.norm = nn.LayerNorm(CONFIG["hidden_size"])
        sizes = CLASSES | OF_A_PATCH
        self.heads = nn.ModuleDict({name: nn.Linear(CONFIG["hidden_size"], size) for name, size in sizes.items()})

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits ``[B, tokens, classes]`` of each head, from what FlowTrain takes as features."""
        hidden = self.encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-1]
        normed = self.norm(hidden)
        return {name: head(normed) for name, head in self.heads.items()}


def loss_of(logits: dict[str, Tensor], batch: Batch) -> Tensor:
    total = torch.zeros(())
    for name, found in logits.items():
        num_tokens = found.shape[1]
        wanted = batch.patches[name] if name in OF_A_PATCH else batch.whole[name][:, None].expand(-1, num_tokens)
        total = total + nn.functional.cross_entropy(found.flatten(0, 1), wanted.reshape(-1))
    return total / len(logits)


def train(steps: int) -> Supervised:
    torch.manual_seed(SEED)
    model, rng = Supervised(), random.Random(f"{SEED}/train")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    started = time.monotonic()
    for step in range(1, steps + 1):
        batch = new_batch(rng, BATCH)
        loss = loss_of(model(batch.pixels), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    return model.eval()


def share_of_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


@torch.inference_mode()
def accuracies(model: Supervised, count: int) -> dict[str, float]:
    """Share of ``count`` new pictures of which all tokens together, or of whose patches each, say the right thing."""
    batch = new_batch(random.Random(f"{SEED}/test"), count)
    logits = model(batch.pixels)
    found = {name: (logits[name].mean(1).argmax(-1) == batch.whole[name]).float().mean().item() for name in CLASSES}
    patches = {name: (logits[name].argmax(-1) == batch.patches[name]).float().mean().item() for name in OF_A_PATCH}
    return found | patches


def save(encoder: SiglipVisionModel, out: Path) -> None:
    encoder.to(torch.bfloat16).save_pretrained(out)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes private files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    default = Path(__file__).resolve().parent / "encoder"
    parser.add_argument("--out", type=Path, default=default, help="folder for the encoder")
    args = parser.parse_args()
    model = train(args.steps)
    save(model.encoder, args.out)
    num_parameters = sum(parameter.numel() for parameter in model.encoder.parameters())
    print(f"{args.out}: {num_parameters / 1e6:.2f} M parameters; of {NUM_TESTED} new pictures right:")
    for name, share in accuracies(model.float(), NUM_TESTED).items():
        print(f"  {name:15} {share:.3f}")


if __name__ == "__main__":
    main()
