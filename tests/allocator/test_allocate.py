"""Whole allocations: the result, that it fits, and the error if nothing fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.model_file import read_model_file
from flowtrain.allocator.program.solvers import Solver, installed_solvers
from flowtrain.allocator.request import Request
from flowtrain.costs.cluster import Cluster
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import (
    MODEL,
    MODELS,
    SETUP,
    cluster,
    request,
    roofline_surrogate,
    several,
    with_memory,
    workload,
)


def allocated(asked: Request, solver: str = "auto") -> Allocation:
    return allocate(asked, roofline_surrogate, Solver(solver))


def check(asked: Request, found: Allocation) -> None:
    """Check what holds for every allocation."""
    *encoders, backbone = found.modules
    assert backbone.name == "backbone" and {each.name.split("@")[0] for each in encoders} == set(asked.model.encoders)
    taken = dict.fromkeys(found.budget, 0)
    for module in found.modules:
        taken[module.device_type] += module.devices
        assert module.peak_nbytes <= module.memory_nbytes
        assert 0.0 < module.mfu < 1.0 and 0.0 <= module.waiting < 1.0
    assert all(taken[name] <= count for name, count in found.budget.items())
    assert asked.workload.global_batch_size >= backbone.degrees.dp
    assert found.rate == min(module.production for module in found.modules)
    assert found.bottleneck in {
        module.name.split("@")[0] for module in found.modules if module.production == found.rate
    }
    for alternative in found.alternatives:
        assert alternative.rate <= found.rate * (1 + 1e-6) and alternative.reason
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("devices", [3, 8, 64, 256, 1000])
def test_one_encoder(devices: int) -> None:
    asked = request(cluster(h200=devices))
    found = allocated(asked)
    check(asked, found)
    assert found.num_combinations == prod(found.num_candidates.values())
    assert found.rate >= max(point.rate for point in found.split_curve) * (1 - 1e-9)


@pytest.mark.parametrize("solver", installed_solvers())
def test_three_encoders_with_every_solver(solver: str) -> None:
    model, data = several(("near", "wide", "dots"))
    asked = request(cluster(h200=64), model, data)
    found, reference = allocated(asked, solver), allocated(asked)
    check(asked, found)
    assert found.solver == solver
    assert (found.rate, found.devices) == (pytest.approx(reference.rate), reference.devices)
    assert found.imbalance == pytest.approx(reference.imbalance, abs=1e-6)


def test_an_encoder_lies_on_one_type_of_devices_and_what_several_would_add_is_said() -> None:
    heavy = workload(images={"vision": (np.array([8, 8]), np.array([32768, 32768]))})
    asked = request(cluster(h200=8, a100=8), data=heavy)
    found = allocated(asked)
    check(asked, found)
    assert len(found.modules) == 2, "a run can start it"
    assert found.rate_added is not None and found.rate_added > 1.2 * found.rate
    alone = allocated(request(cluster(h200=8), data=heavy))
    assert found.rate_added > found.rate >= alone.rate and alone.rate_added is None
    assert found.alternatives and all(len(each.degrees) == 2 for each in found.alternatives), "nor do those that lost"


def test_the_papers_setting_is_planned() -> None:
    """VLM-72B on 256 NPUs of 64 GB; tests/cli/test_plan.py checks its printed form."""
    file = read_model_file(MODELS / "vlm_72b.yaml")
    asked = request(cluster(**{"910b": 256}), file.model, file.workload)
    found = allocated(asked)
    check(asked, found)
    assert found.devices > 224 and found.starved == 0.0


def test_rates_never_fall_with_more_devices() -> None:
    rates = [allocated(request(cluster(h200=count))).rate for count in (4, 8, 16, 32, 64)]
    assert rates == sorted(rates)


def test_a_pool_share_takes_memory_from_encoders() -> None:
    without, with_pool = (
        allocated(request(cluster(h200=64), budget=MemoryBudget(pool_nbytes=nbytes))) for nbytes in (0, 100 * 10**9)
    )
    less = [m.memory_nbytes - n.memory_nbytes for m, n in zip(without.modules, with_pool.modules, strict=True)]
    assert less == [10**11, 0], "the backbone gives nothing"
    assert with_pool.num_candidates["backbone"] == without.num_candidates["backbone"]


# --- nothing is feasible -------------------------------------------------------------------------------------------


def refused(asked: Request) -> str:
    with pytest.raises(ConfigError) as caught:
        allocated(asked)
    return str(caught.value)


def test_missing_devices_are_counted_over_all_modules() -> None:
    model, data = several(("near", "wide", "dots"))
    message = refused(request(cluster(h200=3), model, data))  # the backbone takes two
    assert message.endswith("the nearest feasible choice: 2 h200 more")
    assert allocated(request(cluster(h200=5), model, data)).devices == 5


def test_a_backbone_that_needs_more_devices_says_how_many() -> None:
    file = read_model_file(MODELS / "vlm_72b.yaml")
    asked = request(cluster(**{"910b": 8}), file.model, file.workload)
    message = refused(asked)
    assert message.startswith(
        "backbone has no feasible configuration (on 8 910b: does not fit the device memory, the smallest"
    )
    devices = int(message.split(" devices")[0].rsplit(" ", 1)[1])
    assert f"feasible with {devices} devices" in message
    allocated(replace(asked, cluster=cluster(**{"910b": devices})))
    refused(replace(asked, cluster=cluster(**{"910b": devices - 1})))


def test_recomputation_is_suggested_where_it_helps() -> None:
    none = replace(SETUP, activation_checkpointing="none")
    asked = request(cluster(a100=8), data=workload(microbatch_tokens=65536), setup=none)
    message = refused(asked)
    found = re.fullmatch(
        r".*; feasible with backbone.activation_checkpointing=full; or with "
        r"backbone.activation_checkpointing=offload; or with scheduler.microbatch_tokens=(\d+); or with (\d+) devices",
        message,
    )
    assert found is not None, message
    tokens, devices = map(int, found.groups())
    # Each of them is enough alone, and the nearest of its kind.
    for changed in (
        replace(asked, setup=SETUP),
        replace(asked, setup=replace(SETUP, activation_checkpointing="offload")),
        replace(asked, workload=workload(microbatch_tokens=tokens)),
        replace(asked, cluster=cluster(a100=devices)),
    ):
        allocated(changed)
    refused(replace(asked, workload=workload(microbatch_tokens=2 * tokens)))
    refused(replace(asked, cluster=cluster(a100=devices - 1)))


def test_a_layer_that_fits_nowhere_is_said_to() -> None:
    huge = replace(MODEL.backbone, hidden_size=1 << 17, intermediate_size=1 << 19, num_layers=1)
    message = refused(request(cluster(a100=8), replace(MODEL, backbone=huge)))
    assert "not even 16384 devices or full recomputation are enough: take devices with more memory" in message


def test_an_encoder_whose_batch_is_too_large_names_its_key() -> None:
    message = refused(request(cluster(a100=8), max_batch_patches={"vision": 1 << 24}))
    assert message.startswith("encoders.vision has no feasible configuration")
    assert "feasible with encoders.vision.max_batch_patches=" in message


def test_an_encoder_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no sample has images for encoders.vision"):
        request(cluster(h200=8), data=workload(images={"vision": (np.array([0, 0]), np.array([0, 0]))}))


def test_clusters_are_looked_up_by_name() -> None:
    both = cluster(h200=3, a100=5)
    assert both.counts == {"h200": 3, "a100": 5} and both.num_devices == 8 and both["a100"].count == 5
    with pytest.raises(AssertionError):
        Cluster((both["a100"], both["a100"]))


def test_planning_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys, flowtrain.allocator.allocate, flowtrain.allocator.model_file, flowtrain.costs.profiled_times\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=MODELS.parents[1], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_batch_that_feeds_too_few_replicas_is_said_with_one_that_feeds_enough() -> None:
    """A layer whose heads no degree divides is sharded by data parallelism alone."""
    odd = replace(MODEL.backbone, num_layers=1, num_heads=7, num_kv_heads=7, vocab_size=600_000)
    asked = request(cluster(a100=8), replace(MODEL, backbone=odd), workload(global_batch_size=2))
    peaks = {dp: asked.peak_nbytes(Candidate("backbone", "a100", Degrees(dp))) for dp in (2, 3)}
    assert peaks[3] < peaks[2]
    asked = replace(with_memory(replace(asked, cluster=cluster(a100=4)), peaks[3]), max_batch_patches={"vision": 256})
    batch = int(refused(asked).split("training.global_batch_size=")[1].split(";")[0])
    assert batch == 4
    found = allocated(replace(asked, workload=workload(global_batch_size=batch)))
    assert found.modules[-1].degrees.dp == 3, "which does not divide the batch"
