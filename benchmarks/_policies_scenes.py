"""What the policies are compared on: mixes of samples, models by data sheet, and a model that two cores can train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _lengths import CORPORA, MIXTURES, TOKENS_PER_IMAGE, TOKENS_PER_TILE, Statistics
from _modes_data import GENERATED, QUICKSTART, ROOT, TOKENIZER, Mix, model_settings, write_checkpoint, write_samples
from _modes_runs import Workload

import flowtrain
from flowtrain.allocator.mixture import Mixture
from flowtrain.config.load import load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.emulated_model import emulated_run

VISION, PATCH = "vision", 14
COMMON = (
    "mode=monolithic",
    "data.shuffle=none",
    "checkpoint.every_steps=100000",
    "observability.progress=off",
    "observability.trace.steps=0",
)


@dataclass(frozen=True)
class Policy:
    """overrides: of the configuration. has_groups: its microbatches are groups over the whole data set."""

    name: str
    overrides: tuple[str, ...] = ()
    has_groups: bool = False


STEP_POLICIES = (
    Policy("none"),
    Policy("balanced", ("pipeline.policy=balanced",)),
    Policy("pipetune", ("pipeline.policy=pipetune",)),
    Policy("groups", ("scheduler.packing=groups", "data.shuffle=rows"), has_groups=True),
)
"""How steps are planned; the others are compared with the first."""
CUT_POLICIES = tuple(
    Policy(f"{word} cut", ("pipeline.encoder_layers=mixed", f"pipeline.partition={word}"))
    for word in ("parameters", "uniform", "profile", "balanced")
)
"""Where layers are cut, the encoder's among them (OmniBal's Table 4)."""
CUT_MIXES = ("DataMix2",)
"""Mixes on which cuts are run; they matter little to cuts."""


def components() -> dict[str, list[dict[str, Any]]]:
    """The mixes that the repository has the statistics of, by name, as a model file gives them."""
    found = {
        name: [
            _component(share, corpus.text, corpus.images, TOKENS_PER_IMAGE)
            for share, corpus in zip(shares, CORPORA, strict=True)
        ]
        for name, shares in MIXTURES.items()
    }
    for name, (tiles, (mu, sigma)) in GENERATED.items():
        text = Statistics(math.exp(mu + sigma**2 / 2.0), math.exp(mu), 1 << 20)
        found[name] = [
            _component(share, text, Statistics(count, count, count), TOKENS_PER_TILE) for count, share in tiles.items()
        ]
    return found


def _component(share: float, text: Statistics, images: Statistics | None, patches: int) -> dict[str, Any]:
    component: dict[str, Any] = {"weight": share, "text_tokens": _spread(text)}
    if images is not None:
        component["images"] = {VISION: {"count": _spread(images), "kinds": [{"patches": patches}]}}
    return component


def _spread(given: Statistics) -> dict[str, float]:
    return {"median": given.median, "mean": given.mean, "most": given.maximum}


@dataclass(frozen=True)
class Scene:
    """One model on one mix. config: of a run of so many steps without a policy. policies: the first is the base."""

    model: str
    mix: str
    config: RunConfig
    policies: tuple[Policy, ...]

    @property
    def label(self) -> str:
        """As figures name it."""
        return f"{self.model}.{self.mix}"

    def run_of(self, policy: Policy, name: str, *changes: str) -> RunConfig:
        """Return the configuration of a run; sizes that groups need are taken from the samples once."""
        overrides = [f"name={name}", *policy.overrides, *changes]
        if policy.has_groups:
            sizes = Path(self.config.data.sources[0].path).with_suffix(".csv")
            if not sizes.exists():
                flowtrain.data_check(self.config, workers=1, sizes=sizes)
            overrides.append(f"data.grouping.sizes={sizes}")
        return override_config(self.config, overrides)


@dataclass(frozen=True)
class Published:
    """A model of configs/models on devices by data sheet.

    capacity: tokens of a microbatch. time_scale: of runs on emulated devices; None: it is simulated alone.
    """

    file: str
    device: str
    tp: int
    pp: int
    capacity: int
    policies: tuple[Policy, ...] = STEP_POLICIES
    time_scale: float | None = None
    batch: int = 128

    @property
    def name(self) -> str:
        """With its devices."""
        return f"{self.file}.{self.device}.tp{self.tp}.pp{self.pp}"

    def runs_on(self, mix: str) -> bool:
        """Whether emulated devices run it."""
        return self.time_scale is not None and (self.policies is STEP_POLICIES or mix in CUT_MIXES)

    def scene(self, mix: str, steps: int, directory: Path, seed: int) -> Scene:
        """Write the samples of so many steps, pictures of headers and zeros."""
        document: Any = yaml.safe_load((ROOT / "configs" / "models" / f"{self.file}.yaml").read_text())
        document["workload"] = {
            "global_batch_size": self.batch,
            "microbatch_tokens": self.capacity,
            "fill": 0.97,
            "mixture": {"components": components()[mix], "seed": seed},
        }
        file = directory / f"{self.file}_{mix}.yaml"
        file.write_text(yaml.safe_dump(document))
        overrides = (
            *COMMON,
            f"runs_dir={directory / 'runs'}",
            f"backbone.tensor_parallel_size={self.tp}",
            f"backbone.pipeline_parallel_size={self.pp}",
            f"emulated={{device: {self.device}, time_scale: {self.time_scale or 1.0}, feature_share: 0.01}}",
            f"training.max_steps={steps}",
        )
        samples, count = directory / f"{self.name}-{mix}", self.batch * steps
        config = emulated_run(file, samples, TOKENIZER, overrides, num_samples=count, seed=seed, bytes_per_pixel=0.005)
        return Scene(self.name, mix, config, self.policies)


PUBLISHED = (
    *(Published(f"pipetune_{size}", "a100", 4, 4, 8192) for size in ("3b", "7b", "13b")),
    Published("pipetune_3b", "a100", 1, 4, 8192, time_scale=1.0),
    # Without tensor parallelism, since the tower has 25 heads.
    Published("omnibal_6b_20b", "a100", 1, 4, 8192, CUT_POLICIES, time_scale=0.05),
    Published("omnibal_6b_34b", "a100", 1, 8, 8192, CUT_POLICIES, time_scale=0.05),
)
"""Runs on emulated devices take 4 and 8 of them: of more, the host's own work would show on two cores."""


@dataclass(frozen=True)
class RealModel:
    """The quickstart's shapes on two pipeline ranks; all runs start from one checkpoint. batch: samples of a step."""

    workload: Workload
    tokenizer: Any
    batch: int

    @classmethod
    def write(cls, directory: Path, batch: int) -> RealModel:
        """Write the checkpoint."""
        setting = model_settings(None, 0)[QUICKSTART]
        family = write_checkpoint(setting, directory / "model")
        workload = Workload(setting, directory / "model", Path(), directory, directory, batch)
        return cls(workload, family.tokenizer, batch)

    def scenes(self, mix: str, steps: int, directory: Path, seed: int) -> Iterator[Scene]:
        """Write samples with a mix's lengths, scaled down; yield the scenes of steps and of cuts."""
        own = directory / mix
        own.mkdir(parents=True)
        write_samples(self._scaled(mix, steps * self.batch, seed), self.tokenizer, own / "train.parquet")
        workload = replace(self.workload, samples=own / "train.parquet", scratch=own)
        overrides = (
            *COMMON,
            "backbone.pipeline_parallel_size=2",
            f"training.max_steps={steps}",
            "checkpoint.at_end=false",
            "observability.dashboard=false",
        )
        config = load_config(workload.config_file(), overrides)
        for policies in (STEP_POLICIES, CUT_POLICIES) if mix in CUT_MIXES else (STEP_POLICIES,):
            yield Scene("quickstart.pp2", mix, config, policies)

    def _scaled(self, name: str, count: int, seed: int) -> Mix:
        setting = self.workload.setting
        scale = setting.image_tokens / (TOKENS_PER_TILE if name in GENERATED else TOKENS_PER_IMAGE)
        mixture = Mixture.model_validate({"components": components()[name], "num_samples": count, "seed": seed})
        # The chat template takes some tokens too, which are not scaled.
        text, images = mixture.draw(int(0.9 * setting.microbatch_tokens / scale), {VISION: PATCH})
        order = np.random.default_rng(seed).permutation(count)
        texts = np.maximum(1, np.rint(scale * text[order])).astype(int)
        counts = images[VISION][0][order]
        return Mix(name, tuple(counts.tolist()), tuple(texts.tolist()), f"lengths times {scale:.3f}")
