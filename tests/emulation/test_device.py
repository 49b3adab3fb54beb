"""Emulated devices: jobs share a device, and late wake-ups do not add up."""

from __future__ import annotations

import threading
import time

import pytest

from flowtrain.emulation.device import EmulatedDevice, RankClock


def test_a_job_ends_as_long_after_its_start_as_it_takes() -> None:
    device, now = EmulatedDevice(), time.monotonic()
    assert device.run(0.01, now) == pytest.approx(now + 0.01)
    assert device.run(0.02, now + 0.01) == pytest.approx(now + 0.03)


def test_a_job_that_should_have_ended_long_ago_ends_then() -> None:
    device, before = EmulatedDevice(), time.monotonic() - 10.0
    assert device.run(1.0, before) == pytest.approx(before + 1.0)


def test_jobs_share_a_device_and_slow_each_other_down() -> None:
    device, start = EmulatedDevice(interference=1.5), time.monotonic() - 100.0
    long, short = device.begin(4.0, start), device.begin(1.0, start)
    # The short one takes 2 jobs x 1.5; the long one has 3 s left then, alone.
    assert device.wait(short) == pytest.approx(start + 3.0)
    assert device.wait(long) == pytest.approx(start + 6.0)


def test_a_job_that_begins_later_leaves_what_was_done_before() -> None:
    device, start = EmulatedDevice(interference=1.0), time.monotonic() - 100.0
    first, second = device.begin(4.0, start), device.begin(1.0, start + 2.0)
    assert device.wait(second) == pytest.approx(start + 4.0)
    assert device.wait(first) == pytest.approx(start + 5.0)


def test_a_waiting_job_goes_on_alone_when_the_other_ends() -> None:
    device, now = EmulatedDevice(), time.monotonic()
    long, short = device.begin(0.06, now), device.begin(0.01, now)
    ends: dict[int, float] = {}
    threads = [threading.Thread(target=lambda job=job: ends.update({job: device.wait(job)})) for job in (long, short)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends[short] == pytest.approx(now + 0.02) and ends[long] == pytest.approx(now + 0.07)


def test_jobs_of_a_clock_follow_each_other_and_are_scaled() -> None:
    clock = RankClock([EmulatedDevice()], time_scale=0.5)
    first = clock.now()
    end = clock.compute(0.02, first)
    assert end == pytest.approx(first + 0.01) and clock.now() >= end
    assert clock.busy_s == pytest.approx(0.01)


def test_waits_for_something_real_are_no_work_of_the_host() -> None:
    clock = RankClock([EmulatedDevice()], time_scale=1.0)
    clock.compute(0.0, clock.now())
    started = time.monotonic()
    time.sleep(0.05)
    clock.idled(time.monotonic() - started)
    clock.now()
    assert clock.host_s < 0.05
