"""Products by oneDNN: when, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flowtrain.models import cpu_products
from flowtrain.models.cpu_products import attend_in_blocks, attends_in_blocks, fast_products

BIG, SMALL = (2, 150, 128), (2, 5, 128)


class Kernel:
    """Stands in for oneDNN's, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
        assert rest == ("none", [], "")
        self.num_calls += 1
        return nn.functional.linear(input, weight, bias)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(cpu_products, "_one_dnn", lambda: kernel)
    yield kernel


def run(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    with fast_products(states):
        return layer(states)


def test_large_float32_products_without_gradients_are_one_dnns(kernel: Kernel) -> None:
    layer = nn.Linear(128, 128)
    with torch.no_grad():
        assert torch.equal(run(layer, torch.ones(BIG)), layer(torch.ones(BIG)))
        assert kernel.num_calls == 1
        run(layer, torch.ones(SMALL))
        run(layer.bfloat16(), torch.ones(BIG, dtype=torch.bfloat16))
    run(layer.float(), torch.ones(BIG)).sum().backward()
    assert kernel.num_calls == 1 and layer.weight.grad is not None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [BIG, BIG[1:]])
def test_the_result_is_the_same(shape: tuple[int, ...], bias: bool) -> None:
    layer, states = nn.Linear(128, 192, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        found, expected = run(layer, states), layer(states)
    assert found.shape == expected.shape and (found - expected).norm() < 1e-6 * expected.norm()


def test_a_torch_without_it_computes_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_one_dnn", lambda: None)
    layer, states = nn.Linear(128, 128), torch.randn(BIG)
    with torch.no_grad():
        assert torch.equal(run(layer, states), layer(states))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_in_blocks_is_torchs(
    dtype: torch.dtype, tolerance: float, scaling: float | None, heads: int, kv_heads: int, kernel: Kernel
) -> None:
    """The last block is not full, and the kernel's stand-in shows that both products are its."""
    query, key, value = (torch.randn(2, count, 300, 16, dtype=dtype) for count in (heads, kv_heads, kv_heads))
    found = attend_in_blocks(query, key, value, scaling)
    exact = (each.double() for each in (query, key, value))
    expected = nn.functional.scaled_dot_product_attention(*exact, scale=scaling, enable_gqa=heads != kv_heads)
    assert found.dtype == dtype and (found - expected).norm() < tolerance * expected.norm()
    assert kernel.num_calls == 2 * heads * 3 * 2, "three blocks of two products"


ZEN_4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "avx512f avx512_bf16"}
ZEN_5 = ZEN_4 | {"cpu family": "26"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    def be(found: dict[str, str]) -> None:
        cpu_products._types_in_blocks.cache_clear()
        monkeypatch.setattr(cpu_products, "_processor", lambda: found)

    yield be
    cpu_products._types_in_blocks.cache_clear()


def test_only_long_rows_without_gradients_are_attended_in_blocks(
    kernel: Kernel, processor: Callable[[dict[str, str]], None]
) -> None:
    processor(ZEN_5)
    long, short = torch.empty(1, 2, 1024, 16), torch.empty(1, 2, 1023, 16)
    assert not attends_in_blocks(long), "gradients are on"
    with torch.inference_mode():
        assert attends_in_blocks(long) and attends_in_blocks(long.bfloat16()) and not attends_in_blocks(short)
        assert not attends_in_blocks(long.half()) and not attends_in_blocks(long.to("meta"))


@pytest.mark.parametrize(
    ("found", "types"),
    [
        (ZEN_5, {torch.float32, torch.bfloat16}),
        (ZEN_4, {torch.bfloat16}),
        (ZEN_4 | {"flags": "avx512f"}, set()),
        (ZEN_5 | {"vendor_id": "GenuineIntel"}, set()),
        ({}, set()),
    ],
)
def test_blocks_pay_on_some_processors(
    found: dict[str, str], types: set[torch.dtype], kernel: Kernel, processor: Callable[[dict[str, str]], None]
) -> None:
    processor(found)
    assert cpu_products._types_in_blocks() == types


def test_this_processor_is_read() -> None:
    assert "processor" in cpu_products._processor()
