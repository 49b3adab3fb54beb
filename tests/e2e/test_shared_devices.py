"""Which devices Ray gives to ranks and encoders that share them; the devices exist only in Ray's books."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import ray

from flowtrain.allocator.plan import fixed_plan
from flowtrain.controller import cluster
from flowtrain.controller.actor_specs import actor_specs_of, bundles_of
from flowtrain.controller.mps import nodes_without_mps
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import ActorClasses, WorkerGroup, start_actors, start_backbone
from flowtrain.types.plan import DevicePeak, GradientReduction, RankStart, Sharding, StateOrigin
from tests.training.ranks import make_config

pytestmark = pytest.mark.e2e


class Actor:
    """Any actor; it knows its devices."""

    def __init__(self, *args: object) -> None:
        pass

    def devices(self) -> list[int]:
        return [int(device) for device in ray.get_gpu_ids()]

    def node_address(self) -> str:
        return "127.0.0.1"

    def open_rendezvous(self, host: str = "") -> int:
        return 1

    def start(self, *args: object) -> RankStart:
        reduction, sharding = GradientReduction("step", "a test"), Sharding("full", "a test")
        return RankStart(DevicePeak("made up", 1.0, "a test"), reduction, sharding)

    def run(self, *args: object) -> None:
        pass


def results(calls: Mapping[str, Any]) -> list[Any]:
    return ray.get(list(calls.values()), timeout=600)


def devices_of(workers: WorkerGroup) -> dict[str, list[int]]:
    names = [name for name, role in workers.roles.items() if role is not Role.FEEDER]
    return dict(zip(names, results({name: workers.actors[name].devices.remote() for name in names}), strict=True))


@pytest.mark.parametrize(
    ("dp", "tp", "encoder_tp"), [(2, 1, 1), (1, 2, 1), pytest.param(2, 2, 2, marks=pytest.mark.nightly)]
)
def test_each_device_gets_one_rank_and_one_encoder(ray_cluster: None, dp: int, tp: int, encoder_tp: int) -> None:
    config = make_config(
        name=f"shared-{dp}-{tp}-{encoder_tp}",
        mode="colocated",
        model={"device": "auto"},
        encoders={"vision": {"path": "unused", "num_cpus": 0.1, "tensor_parallel_size": encoder_tp}},
        backbone={"path": "unused", "num_cpus": 0.1, "data_parallel_size": dp, "tensor_parallel_size": tp},
    )
    specs = actor_specs_of(fixed_plan(config))
    classes = ActorClasses(coordinator=Actor, feeder=Actor, encoder=Actor, encoder_rank=Actor, backbone=Actor)
    with cluster.placed(bundles_of(specs), 60.0) as group:
        coordinator = ray.remote(Actor).options(num_cpus=0).remote()
        workers = start_actors(config, specs, group, classes, coordinator, "run", 1)
        try:
            workers.run_producers()
            start_backbone(workers, config.backbone, StateOrigin(), (), results)
            found = devices_of(workers)
            ranks = [device for name, own in found.items() if name.startswith("backbone") for device in own]
            encoders = [device for name, own in found.items() if name.startswith("encoder") for device in own]
            assert len(set(ranks)) == dp * tp, "no two ranks share one"
            assert sorted(encoders) == sorted(ranks)
            workers.replace("encoder-0")
            assert devices_of(workers) == found, "a new encoder gets the share that the dead one left"
        finally:
            workers.kill()


def test_a_node_without_cuda_lacks_no_mps(ray_cluster: None) -> None:
    assert nodes_without_mps() == []
