"""What ``end_to_end.py`` has measured, line by line in a file, so that it can be stopped and go on."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from _modes_data import ROOT

MACHINE_S = "machine_s"
"""In a record's details: processor seconds of the probe of the machine's speed."""


@dataclass(frozen=True)
class Setting:
    """A model with a mix of samples."""

    model: str
    mix: str

    @property
    def label(self) -> str:
        """As figures name it."""
        return f"{self.model}.{self.mix}"


@dataclass(frozen=True)
class Record:
    """One run of one contestant.

    name: of the contestant. round: None for a trial of the search for its settings. tokens_per_s: real tokens after
    warm-up. first_loss: of the first step; None where it is another one by intent. how: its settings, in words.
    details: further figures by name.
    """

    model: str
    mix: str
    name: str
    round: int | None
    tokens_per_s: float
    first_loss: float | None
    how: str = ""
    details: dict[str, float] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.mix)


def code_version(*further: str) -> str:
    """What runs must have in common to be compared: the version of FlowTrain's code, and ``further``."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = "-dirty" if git("status", "--porcelain", "flowtrain") else ""
    return " ".join([git("rev-parse", "--short", "HEAD:flowtrain") + changed, *further])


def newest(path: Path, also: Sequence[str] = ()) -> dict[Setting, dict[str, dict[int, Record]]]:
    """Return each setting's runs by contestant and round, of the last version that has any, and of ``also``."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [(each["version"], Record(**each["record"])) for each in lines if each["record"]["round"] is not None]
    versions = {record.setting: version for version, record in rounds}
    return {
        setting: Store(path, version, also).rounds(setting) for setting, version in sorted(versions.items(), key=str)
    }


class Store:
    """Records of one version. Lines of others stay in the file and do not count.

    Trials of outside peers do, if all but FlowTrain's code was the same: they run none of it but the conversation's
    encoding, which decides the samples and not the speed.
    """

    def __init__(self, path: Path, version: str, also: Sequence[str] = ()) -> None:
        """also: other versions whose records count, the newest first."""
        self._path, self.version = path, version
        self.versions = (version, *also)
        """All that count, the newest first."""
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        further = version.partition(" ")[2]
        alike = [each for each in found if each["version"].partition(" ")[2] == further]
        trials = [each for each in alike if each["record"]["round"] is None]
        rounds = [each for each in alike if each["version"] in self.versions and each["record"]["round"] is not None]
        rounds.sort(key=lambda each: -self.versions.index(each["version"]))  # the last of two counts
        self._records = [Record(**each["record"]) for each in (*trials, *rounds)]

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps({"version": self.version, "record": asdict(record)}) + "\n")

    def has(self, setting: Setting, name: str, number: int, how: str | None = None) -> bool:
        """Whether a round's run was measured. how: with these settings; None: any."""
        found = self.rounds(setting).get(name, {}).get(number)
        return found is not None and how in (None, found.how)

    def trials(self, setting: Setting, name: str) -> dict[str, float]:
        """Tokens/s of a contestant's settings that were tried."""
        tried = (each for each in self._of(setting) if each.name == name and each.round is None)
        return {each.how: each.tokens_per_s for each in tried}

    def rounds(self, setting: Setting) -> dict[str, dict[int, Record]]:
        """Runs by contestant and round."""
        found: dict[str, dict[int, Record]] = defaultdict(dict)
        for each in self._of(setting):
            if each.round is not None:
                found[each.name][each.round] = each
        return dict(found)

    def _of(self, setting: Setting) -> list[Record]:
        return [each for each in self._records if each.setting == setting]
