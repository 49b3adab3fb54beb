"""Memory, descriptors and threads of all processes of a session over time, and what of them grows."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

OURS, RAYS = "flowtrain", "ray"
RAYS_TITLES = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")
"""Of processes that have titles as actors have, and are none."""
GRPC_POOLS = frozenset({"default-executo", "event_engine", "resolver-execut"})
"""Threads of gRPC in the code of Ray that each process loads: started when there is a queue, up to the pool's size."""


@dataclass(frozen=True)
class Held:
    """What a process holds: its own memory in bytes (without files that it maps), descriptors, threads by name."""

    role: str
    owner: str
    own_nbytes: int
    num_descriptors: int
    threads: dict[str, int]

    @property
    def num_threads(self) -> int:
        """All but those of gRPC's pools."""
        return sum(number for name, number in self.threads.items() if name not in GRPC_POOLS)

    @property
    def num_pooled(self) -> int:
        """Threads of the fullest one of gRPC's pools."""
        return max((self.threads.get(name, 0) for name in GRPC_POOLS), default=0)


@dataclass(frozen=True)
class Look:
    """One look at all processes of a session, by number and start; at_s: since the first look; step: the run's."""

    at_s: float
    step: int
    held: dict[tuple[int, int], Held]


@dataclass(frozen=True)
class Growth:
    """What one process held more in the last quarter of the looks than in the second one, as medians.

    nbytes_a_step: the same memory over the steps between the middles of both quarters. new_threads: their names.
    more_pooled, most_pooled: threads of gRPC's pools, which more_threads does not count; the most from the
    second quarter on.
    """

    role: str
    owner: str
    pid: int
    start_nbytes: float
    more_nbytes: float
    more_descriptors: float
    more_threads: float
    nbytes_a_step: float
    new_threads: tuple[str, ...] = ()
    more_pooled: float = 0.0
    most_pooled: int = 0


def look_at(session: int, at_s: float, step: int) -> Look:
    """Look at every process of a session now."""
    held = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, KeyError):  # it has ended, or is about to
            root = Path("/proc") / entry
            fields = (root / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                held[int(entry), int(fields[19])] = _held(root)
    return Look(at_s, step, held)


def _held(root: Path) -> Held:
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    role, owner = role_of((root / "cmdline").read_bytes())
    own = int(status["RssAnon"].split()[0]) << 10
    return Held(role, owner, own, len(os.listdir(root / "fd")), dict(_names_of_threads(root)))


def _names_of_threads(root: Path) -> Counter[str]:
    names: Counter[str] = Counter()
    for task in os.listdir(root / "task"):
        with suppress(OSError):  # it has just ended
            names[(root / "task" / task / "comm").read_text().strip()] += 1
    return names


def as_line(look: Look) -> str:
    """Return a look as a line of JSON, which ``of_line`` reads."""
    held = [[*process, asdict(each)] for process, each in sorted(look.held.items())]
    return json.dumps({"at_s": round(look.at_s, 1), "step": look.step, "held": held})


def of_line(line: str) -> Look:
    """Return the look of a line."""
    values = json.loads(line)
    held = {(pid, start): Held(**each) for pid, start, each in values["held"]}
    return Look(values["at_s"], values["step"], held)


def role_of(command: bytes) -> tuple[str, str]:
    """Return what a process is by its command line, and whose: an actor's class or ``driver``, or a part of Ray."""
    actor = re.match(rb"ray::(\w+)", command)
    if actor is not None:
        name = actor[1].decode()
        return name, RAYS if name in RAYS_TITLES else OURS
    words = command.decode(errors="replace").split("\0")
    if "flowtrain.cli.app" in words:
        return "driver", OURS
    name = next((word for word in words[:2] if "/ray/" in word), words[0])
    return Path(name).name or "unknown", RAYS


def growths(looks: Sequence[Look]) -> Iterator[Growth]:
    """Yield the growth of each process that lived from the first quarter of the looks to the end.

    What a process takes in its first quarter does not count: caches fill, the allocator finds its size.
    """
    quarter = len(looks) // 4
    if quarter == 0:
        raise ValueError(f"{len(looks)} looks have no quarters; look at least four times")
    second, last = looks[quarter : 2 * quarter], looks[-quarter:]
    steps = median(look.step for look in last) - median(look.step for look in second)
    common = set.intersection(*(set(look.held) for look in looks[quarter:]))
    for process in sorted(common):
        early, late = ([look.held[process] for look in part] for part in (second, last))
        start = median(held.own_nbytes for held in early)
        more = median(held.own_nbytes for held in late) - start
        yield Growth(
            role=late[-1].role,
            owner=late[-1].owner,
            pid=process[0],
            start_nbytes=start,
            more_nbytes=more,
            more_descriptors=_more(early, late, "num_descriptors"),
            more_threads=_more(early, late, "num_threads"),
            nbytes_a_step=more / steps if steps else 0.0,
            new_threads=tuple(sorted((Counter(late[-1].threads) - Counter(early[0].threads)).elements())),
            more_pooled=_more(early, late, "num_pooled"),
            most_pooled=max(look.held[process].num_pooled for look in looks[quarter:]),
        )


def _more(early: Sequence[Held], late: Sequence[Held], name: str) -> float:
    return median(getattr(held, name) for held in late) - median(getattr(held, name) for held in early)


def worst_by_role(found: Sequence[Growth], owner: str) -> dict[str, list[Growth]]:
    """Return growths of one owner's processes by role, the greatest first."""
    by_role = defaultdict(list)
    for growth in found:
        if growth.owner == owner:
            by_role[growth.role].append(growth)
    return {role: sorted(each, key=lambda growth: -growth.more_nbytes) for role, each in sorted(by_role.items())}
