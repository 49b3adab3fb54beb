"""The backbone's process groups: where they listen, and how long they wait."""

from __future__ import annotations

import os

import pytest
import torch

from flowtrain.errors import StallError
from flowtrain.training.mesh import _interface_of, _local_address, init_backbone_group, open_listener
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, make_config, run_ranks

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_listen_on_loopback_alone(world_size):
    before = dict(os.environ)
    for outcome in run_ranks(world_size, Job(make_config(), ())):
        assert outcome.listening == {"0100007F"}
    assert dict(os.environ) == before


def test_a_missing_rank_ends_the_wait_with_both_counts():
    with pytest.raises(StallError, match=r"rank 0 of 2 waited 0\.5 s \(limits\.start_timeout_s\)"):
        init_backbone_group(0, Degrees(dp=2), torch.device("cpu"), listener=open_listener(), start_timeout_s=0.5)
    assert not torch.distributed.is_initialized()


def test_the_interface_is_the_one_that_reaches_the_host():
    assert _interface_of(_local_address("127.0.0.1")) == "lo"
    assert _interface_of("192.0.2.1") is None  # an address kept for documentation is nobody's
