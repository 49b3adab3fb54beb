"""What a rank says about itself."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flowtrain.actors.whereabouts import Diary, dump_stacks


def test_a_note_counts_from_the_start_of_its_unit() -> None:
    diary = Diary()
    assert (diary.read().unit, diary.read().place) == (-1, 0)
    diary.begin_unit(4, 3)
    diary.begin("a wait for data", may_last=True)
    assert diary.read().may_last
    diary.begin("forward")
    now = diary.read()
    assert (now.unit, now.step, now.place, now.what, now.may_last) == (4, 3, 2, "forward", False)
    assert now.for_s >= 0.0 and now.pid == os.getpid()
    diary.begin_unit(5, 4)
    diary.begin("forward")
    assert (diary.read().unit, diary.read().place) == (5, 1)


def test_stacks_are_written_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "step-00000003" / "rank.txt"
    dump_stacks(path)
    assert "test_stacks_are_written_for_their_owner_alone" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
