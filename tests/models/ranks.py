"""Helpers of these tests: tiny backbones, packed batches, and processes that hold a group's ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector

FEATURE_DIM, IMAGE_TOKEN, PAD_TOKEN = 6, 3, 30
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 36,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "pad_token_id": PAD_TOKEN,
}


def make_backbone(
    values: Mapping[str, Any], *, frozen: tuple[str, ...] = (), seed: int = 5, attention: str = "sdpa"
) -> Backbone:
    """A tiny backbone with random weights everywhere, norms and biases too."""
    torch.manual_seed(seed)
    settings = dict(values)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    language_model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation_name(attention))
    backbone = Backbone(Connector(FEATURE_DIM, config.hidden_size), language_model).train()
    for parameter in backbone.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    for name in frozen:
        {"connector": backbone.connector, "backbone": backbone.language_model}[name].requires_grad_(False)
    return backbone


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (7, 1, 12, 4), vocab_size: int = 36) -> dict[str, Any]:
    """A packed batch with tokens of padding's id, targets at about half the places, and images unless it is tiny."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    input_ids = torch.randint(4, vocab_size, (num_tokens,), generator=generator)
    input_ids[-1] = PAD_TOKEN
    feature_index = torch.tensor([1, 2, num_tokens - 3] if num_tokens > 5 else [], dtype=torch.int64)
    input_ids[feature_index] = IMAGE_TOKEN
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[torch.rand(num_tokens, generator=generator) < 0.5] = -100
    targets[0] = 5
    return {
        "input_ids": input_ids,
        "targets": targets,
        "weights": torch.rand(num_tokens, generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "features": torch.randn(len(feature_index), FEATURE_DIM, generator=generator),
        "feature_index": feature_index,
    }


def full_gradients(*modules: nn.Module) -> dict[str, np.ndarray]:
    """Whole gradients by name, those of parameters that two modules have under different names apart."""
    gradients = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = full(parameter.grad)
    return gradients


def full(tensor: Tensor) -> np.ndarray:
    """All of a tensor that may be spread over ranks."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().copy()


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Every array, by the norm of the difference; a reference that the tolerance takes for zero is one."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        size = float(np.linalg.norm(reference))
        limit = tolerance * max(size, 1e-3)
        exact = reference if size > limit else np.zeros_like(reference)  # two roundings of a zero add up
        difference = float(np.linalg.norm(found[name] - exact))
        assert difference <= limit, (name, difference, size)


# --- processes -------------------------------------------------------------------------------------------------------


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function of a module in fresh processes of one gloo group; what it returns, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.ranks"])
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(world_size):
            end, other_end = context.Pipe(duplex=False)
            arguments_of_rank = (other_end, rank, world_size, Path(folder) / "store", function, arguments)
            processes.append(context.Process(target=_run_rank, args=arguments_of_rank))
            processes[-1].start()
            other_end.close()
            ends.append(end)
        results = [_receive(end, rank) for rank, end in enumerate(ends)]
        for process in processes:
            process.join(30)
    return results


def _run_rank(
    end: Connection, rank: int, world_size: int, store: Path, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    end.send(function(*arguments))
    dist.destroy_process_group()


def _receive(end: Connection, rank: int) -> Any:
    try:
        assert end.poll(120), f"rank {rank} gave no result in 120 s"
        return end.recv()
    except EOFError as error:
        raise AssertionError(f"rank {rank} died; its traceback is above") from error
