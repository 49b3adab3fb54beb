"""A step's metrics to write."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from flowtrain.types.metrics import StepMetrics


class MakeMetrics(Protocol):
    def __call__(self, step: int, **changes: Any) -> StepMetrics: ...


@pytest.fixture(scope="session")
def make_metrics() -> MakeMetrics:
    """Metrics of a step, with some values changed."""

    def make(step: int, **changes: Any) -> StepMetrics:
        values: dict[str, Any] = {
            "step": step,
            "epoch": step / 10,
            "loss": 1 / step,
            "lr": 1e-4,
            "grad_norm": 0.5,
            "num_samples": 8,
            "num_tokens": 4000,
            "num_target_tokens": 300,
            "step_time_s": 2.0,
            "tokens_per_s": 2000.0,
            "tokens_per_s_per_device": 1000.0,
            "mfu": None,
            "backbone_mfu": None,
            "peak_flops": None,
            "starved_s": 0.5,
            "blocked_s": 0.1,
            "fetch_s": 0.05,
            "read_nbytes": 4096,
            "plan_digest": f"{step:016x}",
            "plan_time_s": 0.01,
            "plan_wait_s": 0.002,
            "produced_samples_per_s": 4.0,
            "consumed_samples_per_s": 4.0,
            "num_microbatches": 2,
            "packing_fill": 0.9,
            "dp_imbalance": 1.1,
            "pool_dram_nbytes": 1024,
            "pool_hbm_nbytes": 0,
            "eval_loss": None,
            "rejected": 0,
        }
        return StepMetrics(**(values | changes))

    return make
