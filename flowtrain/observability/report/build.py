"""From runs' directories to one page."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from flowtrain.errors import ConfigError
from flowtrain.observability.report.blocks import Section, charts, gantt_figure
from flowtrain.observability.report.compare import (
    Compared,
    changes_table,
    compared_charts,
    figures_table,
    labels_of,
    paired_table,
)
from flowtrain.observability.report.data_sections import (
    ImageOf,
    ask_generated,
    ask_quarantined,
    generated_content,
    generated_of,
    quarantine_content,
    sources_table,
    transports_table,
)
from flowtrain.observability.report.figures import Chart
from flowtrain.observability.report.gantt import gantt_of, is_too_large, read_trace, step_ends
from flowtrain.observability.report.markup import Content, element, join
from flowtrain.observability.report.outcome import key_figures, outcome_of, verdict_of
from flowtrain.observability.report.page import page
from flowtrain.observability.report.pictures import Pictures
from flowtrain.observability.report.reading import Notes
from flowtrain.observability.report.run_charts import flow_charts, learning_charts, packing_charts, speed_charts
from flowtrain.observability.report.run_data import RunData, read_run
from flowtrain.observability.report.run_sections import (
    PILL,
    checkpoints_table,
    configuration,
    faults_table,
    glance,
    lead,
    modes_table,
    notes_box,
    packing_table,
    plan_content,
    steady_note,
    verdict_box,
)

MAX_RUNS = 6
"""Runs in one page: as many as there are colours."""
_WINDOW = re.compile(r"steps-(\d+)-(\d+)")
"""Begins the name of a window's directory."""


@dataclass(frozen=True, slots=True, order=True)
class _Window:
    """What ``flowtrain trace`` recorded at one time."""

    first: int
    """Its first whole step."""
    last: int
    path: Path
    is_shown: bool
    """A page can show it; otherwise the steps are those that were asked for."""

    @property
    def steps(self) -> str:
        """As ``--steps`` takes them."""
        return f"{self.first}-{self.last}"

    @property
    def name(self) -> str:
        """Of the file, within the run's traces."""
        return f"{self.path.parent.name}/{self.path.name}"

    def has_any_of(self, steps: tuple[int, int]) -> bool:
        """Whether it has one of these steps, given by the first and the last."""
        return self.first <= steps[1] and steps[0] <= self.last


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report shows."""

    steps: tuple[int, int] | None = None
    """First and last step of the timeline; None: three from the middle of the trace."""
    thumbnails: bool = True
    """Show pictures of rejected and generated samples."""
    image_of: ImageOf | None = None
    """Reads the image of a rejected sample; None: rejected samples have no pictures."""


def build_report(
    roots: Sequence[str | os.PathLike[str]], options: ReportOptions | None = None, now: float | None = None
) -> str:
    """Return the page of a run, or of several side by side; a run's directory is all that is read.

    now: seconds since the Unix epoch; None: the clock's. Raises ConfigError if a directory is no run's, and if the
    steps of the timeline are not in a trace.
    """
    options = ReportOptions() if options is None else options
    now = time.time() if now is None else now
    if not 1 <= len(roots) <= MAX_RUNS:
        raise ConfigError(f"{len(roots)} runs: a report shows 1 to {MAX_RUNS} runs; leave some out")
    runs = [read_run(Path(root)) for root in roots]
    if len(runs) == 1:
        return _single(runs[0], options, now)
    return _comparison(runs, options, now)


def _single(run: RunData, options: ReportOptions, now: float) -> str:
    outcome = outcome_of(run, now)
    heading = join([run.name, " ", element("span", str(outcome.state), class_=f"pill {PILL[outcome.state]}")])
    sections = _sections(run, options, now, "", Pictures(options.thumbnails))
    return page(f"{run.name}: FlowTrain report", "FlowTrain run report", heading, lead(run, outcome), sections, now)


def _sections(run: RunData, options: ReportOptions, now: float, prefix: str, pictures: Pictures) -> list[Section]:
    """Return the sections of one run; prefix: of their keys."""
    figures = key_figures(run)
    outcome = outcome_of(run, now)
    samples = generated_of(run)
    ask_quarantined(run, pictures, options.image_of if options.thumbnails else None, prefix)
    ask_generated(run, samples, pictures, prefix)
    trace_notes = Notes()
    windows = _windows(run, trace_notes)
    timeline = _timeline(run, options, prefix, trace_notes, windows)
    steady = element("p", steady_note(run), class_="muted") if len(run.steps) else None
    at_once: list[Content] = [verdict_box(outcome, verdict_of(run, figures)), glance(run, figures), steady]
    found: list[tuple[str, str, list[Content]]] = [
        ("glance", "At a glance", [*at_once, notes_box((*run.notes, *trace_notes.texts))]),
        ("learning", "Learning", [_charts(learning_charts(run), prefix)]),
        ("samples", "Generated samples", [generated_content(samples, pictures, prefix)]),
        ("speed", "Speed", [_charts(speed_charts(run), prefix)]),
        ("flow", "Flow of data", [_charts(flow_charts(run), prefix), transports_table(run)]),
        ("timeline", "Timeline", [timeline, _windows_note(windows)]),
        ("packing", "Packing and balance", [_charts(packing_charts(run), prefix), packing_table(run)]),
        ("plan", "Plan and reality", [*plan_content(run, figures), modes_table(run)]),
        ("data", "Data", [sources_table(run)]),
        ("quarantine", "Quarantine", [*quarantine_content(run, pictures, prefix)]),
        ("faults", "Faults and restarts", [faults_table(run) or element("p", "None.", class_="muted")]),
        ("checkpoints", "Checkpoints", [checkpoints_table(run)]),
        ("configuration", "Configuration", [configuration(run)]),
    ]
    return [
        Section(f"{prefix}{key}", title, join(content))
        for key, title, content in found
        if any(each for each in content)
    ]


def _charts(shown: Sequence[Chart], prefix: str) -> Markup | None:
    return charts(replace(chart, key=f"{prefix}{chart.key}-chart") for chart in shown)


def _timeline(
    run: RunData, options: ReportOptions, prefix: str, notes: Notes, windows: Sequence[_Window] = ()
) -> Markup | None:
    """Return the picture of some steps; None without a trace. notes: about traces."""
    work = read_trace(run.files.trace, notes)
    first, last = options.steps if options.steps is not None else (None, None)
    gantt = gantt_of(work, run.steps, first, last) if work else None
    if gantt is not None:
        return gantt_figure(gantt, f"{prefix}gantt")
    if options.steps is not None:
        for window in windows:  # read again, since all of them at once would take much memory
            if window.has_any_of(options.steps):
                work_of = read_trace(window.path, notes, window.name)
                if (gantt := gantt_of(work_of, run.steps, first, last)) is not None:
                    return gantt_figure(gantt, f"{prefix}gantt")
        traced = sorted(step_ends(work, run.steps))
        has = f"it has steps {traced[0]} to {traced[-1]}" if traced else "it has no whole step"
        why = "; ".join((has, *notes.texts))
        raise ConfigError(f"steps {first} to {last} (--steps) are not in {run.files.trace}: {why}")
    return None


def _windows(run: RunData, notes: Notes) -> list[_Window]:
    """Return the windows of ``flowtrain trace`` that have a whole step, in order."""
    found = []
    for path in run.files.windows.glob("*/trace.json"):
        if match := _WINDOW.match(path.parent.name):
            asked = _Window(int(match[1]), int(match[2]), path, not is_too_large(path))
            ends = step_ends(read_trace(path, notes, asked.name), run.steps)
            steps = [step for step in ends if asked.first <= step <= asked.last]  # a run that ended earlier has fewer
            if steps or not asked.is_shown:
                found.append(replace(asked, first=steps[0], last=steps[-1]) if steps else asked)
    return sorted(found)


def _windows_note(windows: Sequence[_Window]) -> Markup | None:
    if not windows:
        return None
    text = f"flowtrain trace has recorded steps {', '.join(dict.fromkeys(each.steps for each in windows))}"
    if shown := [each for each in windows if each.is_shown]:
        which = "the last of them" if shown[-1] == windows[-1] else "the last that a page can show"
        text += f": flowtrain report RUN --steps {shown[-1].steps} shows {which}"
    return element("p", f"{text}.", class_="muted")


def _comparison(runs: Sequence[RunData], options: ReportOptions, now: float) -> str:
    labels = labels_of(runs)
    compared = [
        Compared(label, run, outcome_of(run, now), key_figures(run)) for label, run in zip(labels, runs, strict=True)
    ]
    notes = [f"{each.label}: {note}" for each in compared for note in each.run.notes]
    sections = [
        Section("glance", "At a glance", join([figures_table(compared), notes_box(notes)])),
        Section(
            "differences",
            "Paired differences",
            join([paired_table(compared) or element("p", "The runs have no step in common.", class_="muted"), _PAIRED]),
        ),
    ]
    drawn = _charts(compared_charts(compared), "")
    if drawn is not None:
        sections.append(Section("curves", "Curves", drawn))
    changes = changes_table(compared) or element("p", "The configurations are the same.", class_="muted")
    sections.append(Section("configurations", "Configurations", changes))
    sections += [_of_one(each, options, now, f"run{index}-") for index, each in enumerate(compared, start=1)]
    title = f"{len(runs)} runs: {', '.join(labels)}"
    lead_text = f"Each run is compared with the first one, {labels[0]}."
    return page(
        f"{title[:120]}: FlowTrain report", "FlowTrain comparison", " and ".join(labels), lead_text, sections, now
    )


_PAIRED = element(
    "p",
    "Steps are compared with the step of the same number. Neighbouring steps are alike, so an interval is that of the "
    "means of ten blocks of steps. Differences whose interval leaves out 0 are coloured. Rates leave out the first "
    "step of each start. They are geometric means of the steps' ratios; the figures above divide all tokens by all "
    "time, so there one long step counts for more. Same plans: steps that packed the same samples in the same way.",
    class_="muted",
)


def _of_one(each: Compared, options: ReportOptions, now: float, prefix: str) -> Section:
    """Return what a comparison shows of a single run."""
    run = each.run
    notes = Notes()
    alone = replace(options, steps=None)  # traces of several runs rarely have the same steps
    content: list[Content] = [
        element("p", lead(run, each.outcome), class_="muted"),
        verdict_box(each.outcome, verdict_of(run, each.figures)),
        _timeline(run, alone, prefix, notes),
        notes_box(notes.texts),
        *plan_content(run, each.figures),
        faults_table(run),
    ]
    return Section(f"{prefix}run", f"Run {each.label}", join(content))
