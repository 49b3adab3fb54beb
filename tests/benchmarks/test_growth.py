"""What the soak of a whole run calls growth."""

from __future__ import annotations

import os

import pytest
from _growth import OURS, RAYS, Held, Look, as_line, growths, look_at, of_line, role_of, worst_by_role

LOOKS = 40
MIB = 2**20


def held(
    own_nbytes: int, num_descriptors: int = 10, role: str = "Encoder", owner: str = OURS, more_threads: int = 0
) -> Held:
    return Held(role, owner, own_nbytes, num_descriptors, threads={"python": 5, "reader": more_threads})


def test_a_leak_is_found_and_a_cache_that_fills_is_none() -> None:
    looks = [
        Look(
            at_s=15.0 * number,
            step=100 * number,
            held={
                (1, 7): held(MIB + 1000 * number, num_descriptors=10 + number, role="leaks"),
                (2, 7): held(MIB + min(number, LOOKS // 4) * MIB, role="fills"),
                (3, 7): held(MIB + number % 2 * MIB, role="flutters", more_threads=number // 10),
            },
        )
        for number in range(LOOKS)
    ]
    found = {growth.role: growth for growth in growths(looks)}
    quarters = 20  # looks between the middles of the second and the last quarter
    assert found["leaks"].more_nbytes == 1000 * quarters and found["leaks"].nbytes_a_step == 10.0
    assert found["leaks"].more_descriptors == quarters and found["leaks"].more_threads == 0
    assert found["fills"].more_nbytes == found["flutters"].more_nbytes == 0
    assert found["flutters"].more_threads == 2 and found["flutters"].new_threads == ("reader", "reader")


def test_threads_of_grpcs_pools_are_counted_apart() -> None:
    def with_pools(number: int) -> Held:
        return Held("Encoder", OURS, MIB, 10, threads={"python": 5, "event_engine": 2 + number // 10, "reader": 1})

    looks = [Look(float(number), number, {(1, 7): with_pools(number)}) for number in range(LOOKS)]
    (growth,) = growths(looks)
    assert growth.more_threads == 0 and growth.more_pooled == 2 and growth.most_pooled == 5


def test_a_process_is_judged_that_lived_from_the_first_quarter_to_the_end() -> None:
    looks = [Look(float(number), number, {}) for number in range(8)]
    for number, look in enumerate(looks):
        look.held[1, 0] = held(MIB)
        if number >= 2:
            look.held[2, 0] = held(MIB)
        if number >= 3:
            look.held[3, 0] = held(MIB)
        if number < 7:
            look.held[4, 0] = held(MIB)
        look.held[5, number] = held(MIB)  # a number that several processes had
    assert [growth.pid for growth in growths(looks)] == [1, 2]


def test_too_few_looks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 looks"):
        list(growths([Look(0.0, 0, {})] * 3))


def test_roles_are_read_from_command_lines() -> None:
    assert role_of(b"ray::BackboneRank.run") == ("BackboneRank", OURS)
    assert role_of(b"ray::IDLE") == ("IDLE", RAYS)
    assert role_of(b"python\0-m\0flowtrain.cli.app\0train\0x.yaml") == ("driver", OURS)
    assert role_of(b"/usr/lib/ray/core/src/ray/raylet/raylet\0--flag") == ("raylet", RAYS)
    assert role_of(b"") == ("unknown", RAYS)


def test_the_worst_of_a_role_is_first() -> None:
    looks = [Look(float(number), number, {(pid, 0): held(MIB + pid * number) for pid in (1, 2)}) for number in range(8)]
    assert [growth.pid for growth in worst_by_role(list(growths(looks)), OURS)["Encoder"]] == [2, 1]
    assert worst_by_role(list(growths(looks)), RAYS) == {}


def test_a_look_at_this_session_has_this_process_and_survives_its_line() -> None:
    look = look_at(os.getsid(0), 1.5, 3)
    (mine,) = [each for (pid, _), each in look.held.items() if pid == os.getpid()]
    assert mine.own_nbytes > MIB and mine.num_descriptors > 2 and mine.num_threads >= 1
    assert of_line(as_line(look)) == look
