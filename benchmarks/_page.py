"""A report of figures in Markdown: what benchmarks of a paper's tables write beside ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, field

from _report import Figure


@dataclass
class Page:
    """Figures, and the tables of the report."""

    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def table(self, title: str, header: str, rows: list[str], note: str = "") -> None:
        """Add a table; cells are separated by bars."""
        columns = header.count("|") + 1
        self.lines += ["", f"## {title}", "", f"| {header} |", "|" + " --- |" * columns]
        self.lines += [f"| {row} |" for row in rows]
        self.lines += ["", note] if note else []
