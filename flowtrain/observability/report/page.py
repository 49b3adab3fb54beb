"""A whole page: sections under a heading, with a style sheet, and a policy that allows no script and no request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from markupsafe import Markup

from flowtrain.observability.report.blocks import Section
from flowtrain.observability.report.markup import Content, element
from flowtrain.observability.report.units import moment

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f7f7f5; --panel: #ffffff; --ink: #1d2126; --muted: #565e68; --rule: #dfe2e6; --grid: #eaecef;
  --link: #1a5aa8; --good: #17663f; --good-bg: #e3f3ea; --bad: #a3231f; --bad-bg: #fbe7e5;
  --warn: #7a4b00; --warn-bg: #fbf0d9; --info: #1a5aa8; --info-bg: #e5eef9;
  --c0: #1f64ad; --c1: #b8500f; --c2: #1b7a52; --c3: #7d3fa6; --c4: #86680a; --c5: #b0285f;
  --size: #8d97a3; --pack: #565e68; --decode: #b48a1e; --encode: #8a55b0; --put: #c07fb0; --fetch: #3d9e9a;
  --forward: #2f74bd; --backward: #1d4c86; --optimizer: #b8500f; --checkpoint: #a3231f; --generate: #1b7a52;
  --other: #a9adb3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #131619; --panel: #1a1e22; --ink: #e7eaed; --muted: #a3acb6; --rule: #30363d; --grid: #262b31;
    --link: #7db5f2; --good: #7fd3a5; --good-bg: #163226; --bad: #f59a94; --bad-bg: #3c1d1c;
    --warn: #ecc377; --warn-bg: #362a12; --info: #8fbff5; --info-bg: #172a42;
    --c0: #6fb0f2; --c1: #f0985a; --c2: #63c596; --c3: #c394e8; --c4: #d8b94e; --c5: #f07fa8;
    --size: #7c8794; --pack: #b0b8c1; --decode: #d3b04c; --encode: #b386d8; --put: #d9a0cb; --fetch: #5fbfba;
    --forward: #5b9fe6; --backward: #3a70b0; --optimizer: #ef9454; --checkpoint: #ee7d77; --generate: #63c596;
    --other: #666d75;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: auto; }
body { margin: 0; background: var(--bg); color: var(--ink); line-height: 1.5; overflow-wrap: break-word;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 15px;
  font-variant-numeric: tabular-nums; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--panel); padding: .4rem .8rem; z-index: 1; }
header, main, footer, nav { max-width: 78rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.25rem; }
.kicker { margin: 0; color: var(--muted); font-size: .8rem; letter-spacing: .06em; text-transform: uppercase; }
h1 { margin: .15rem 0 .35rem; font-size: 1.9rem; line-height: 1.2; font-weight: 650; letter-spacing: -.01em;
  display: flex; flex-wrap: wrap; gap: .3rem .9rem; align-items: center; overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .9rem; font-size: 1.25rem; font-weight: 650; letter-spacing: -.005em; }
h3 { margin: 0; font-size: .95rem; font-weight: 600; }
p { margin: .4rem 0; max-width: 72ch; }
.lead { color: var(--muted); margin: 0; max-width: none; }
.pill { font-size: .82rem; font-weight: 600; letter-spacing: 0; padding: .18rem .7rem; border-radius: 1rem;
  background: var(--info-bg); color: var(--info); }
.pill.done { background: var(--good-bg); color: var(--good); }
.pill.failed { background: var(--bad-bg); color: var(--bad); }
.pill.stopped, .pill.killed, .pill.empty { background: var(--warn-bg); color: var(--warn); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: .8rem 0; margin: 1.2rem 0 0;
  border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule); font-size: .88rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: .75rem; margin: 0; }
.tile { background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; padding: .7rem .9rem; }
.tile dt { color: var(--muted); font-size: .8rem; }
.tile dd { margin: 0; }
.tile .value { font-size: 1.3rem; font-weight: 600; line-height: 1.35; letter-spacing: -.01em; }
.tile .sub { color: var(--muted); font-size: .8rem; }
.verdict { background: var(--panel); border: 1px solid var(--rule); border-left: 4px solid var(--c0);
  border-radius: .35rem; padding: .8rem 1.1rem; margin: 0 0 .9rem; }
.tiles ~ .verdict, .panel ~ .verdict { margin-top: .9rem; }
.verdict p { margin: .15rem 0; }
.verdict .first { font-size: 1.08rem; font-weight: 550; }
.verdict.bad { border-left-color: var(--bad); }
.verdict.warn { border-left-color: var(--warn); }
.muted { color: var(--muted); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .9rem; }
.charts.pairs { grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }
figure { margin: 0; background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem;
  padding: .8rem .9rem .7rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: baseline; justify-content: space-between; }
figcaption .now { color: var(--muted); font-size: .82rem; }
figure .note { color: var(--muted); font-size: .82rem; margin: .3rem 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0 0; padding: 0;
  font-size: .82rem; }
.legend li { display: flex; gap: .4rem; align-items: center; min-width: 0; overflow-wrap: anywhere; }
.swatch { width: 1.1rem; height: 0; border-top: 3px solid var(--c0); flex: none; }
.swatch.bound { border-top-style: dashed; }
.swatch.points { width: .55rem; height: .55rem; border: 0; border-radius: 50%; background: var(--c0); }
.swatch.block { height: .7rem; border: 0; border-radius: .12rem; }
svg { display: block; overflow: visible; font-size: 11px; }
svg.chart { margin: 20px 12px 36px 52px; width: calc(100% - 64px); height: 154px; }
svg.chart.tall { height: 218px; }
svg text { fill: var(--muted); }
.tick-y { text-anchor: end; }
.tick-x { text-anchor: middle; }
.name-x { text-anchor: end; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--rule); }
.line { fill: none; stroke: currentColor; stroke-width: 1.7; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; }
.line.faint { opacity: .32; stroke-width: 1; }
.line.bound { stroke-dasharray: 6 4; stroke-width: 1.2; opacity: .8; }
.band { fill: currentColor; opacity: .16; stroke: none; }
.dot { fill: currentColor; stroke: var(--panel); stroke-width: 1; }
.mark { stroke: var(--bad); stroke-dasharray: 2 3; stroke-width: 1.5; pointer-events: stroke; }
.hover { fill: transparent; }
.hover:hover { fill: var(--ink); opacity: .06; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.swatch.c0, .swatch.c1, .swatch.c2, .swatch.c3, .swatch.c4, .swatch.c5 { border-top-color: currentColor; }
.swatch.points.c0, .swatch.points.c1, .swatch.points.c2, .swatch.points.c3, .swatch.points.c4, .swatch.points.c5 {
  background: currentColor; }
.scroll { overflow-x: auto; max-width: 100%; }
svg.gantt { margin: 28px 20px 26px 168px; width: calc(100% - 188px); min-width: 34rem; }
.lane-name { text-anchor: end; fill: var(--ink); }
.lane-name.side { fill: var(--muted); }
.lane-top { stroke: var(--grid); }
.step-end { stroke: var(--muted); stroke-width: 1; }
.step-name { text-anchor: middle; }
.bar:hover { stroke: var(--ink); }
.k-size { fill: var(--size); background: var(--size); } .k-pack { fill: var(--pack); background: var(--pack); }
.k-decode { fill: var(--decode); background: var(--decode); }
.k-encode { fill: var(--encode); background: var(--encode); } .k-put { fill: var(--put); background: var(--put); }
.k-fetch { fill: var(--fetch); background: var(--fetch); }
.k-forward { fill: var(--forward); background: var(--forward); }
.k-backward { fill: var(--backward); background: var(--backward); }
.k-optimizer { fill: var(--optimizer); background: var(--optimizer); }
.k-checkpoint { fill: var(--checkpoint); background: var(--checkpoint); }
.k-generate { fill: var(--generate); background: var(--generate); }
.k-restart { fill: var(--bad); background: var(--bad); }
.k-other { fill: var(--other); background: var(--other); }
table { border-collapse: collapse; background: var(--panel); font-size: .88rem; min-width: min(100%, 28rem); }
.panel { background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; padding: .7rem .9rem;
  margin: .9rem 0; }
caption { text-align: left; font-weight: 600; font-size: .95rem; padding: 0 0 .4rem; }
th, td { text-align: left; padding: .34rem .9rem .34rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 550; }
tbody th { font-weight: 500; }
.number { text-align: right; white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
td.text, th.text { min-width: 8rem; max-width: 46rem; }
.when { white-space: nowrap; }
td img, .sample img { display: block; max-width: 100%; height: auto; border-radius: .25rem;
  border: 1px solid var(--rule); }
td img { max-width: 7rem; max-height: 7rem; width: auto; }
.better { color: var(--good); font-weight: 600; }
.worse { color: var(--bad); font-weight: 600; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: .9rem; }
.sample { background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; padding: .9rem; min-width: 0; }
.sample h3 { margin-bottom: .5rem; }
.sample .pictures { display: flex; flex-wrap: wrap; gap: .4rem; margin-bottom: .5rem; }
.sample dl { margin: 0; }
.sample dt { color: var(--muted); font-size: .8rem; margin-top: .4rem; }
.sample dd { margin: 0; }
details { margin: .7rem 0; }
summary { cursor: pointer; font-weight: 550; }
pre { margin: .5rem 0 0; padding: .9rem; background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem;
  overflow-x: auto; font-size: .82rem; line-height: 1.45;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.notes { margin: 0; padding-left: 1.2rem; }
footer { color: var(--muted); font-size: .82rem; padding-top: 2.5rem; padding-bottom: 2.5rem; }
@media (max-width: 40rem) {
  body { font-size: 14.5px; }
  header, main, footer, nav { padding-left: .9rem; padding-right: .9rem; }
  header { padding-top: 1.3rem; }
  h1 { font-size: 1.5rem; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(9.2rem, 1fr)); gap: .5rem; }
  .tile { padding: .55rem .7rem; }
  .tile .value { font-size: 1.1rem; }
}
@media print {
  body { background: #ffffff; }
  nav, .skip { display: none; }
  figure, .tile, .sample { break-inside: avoid; }
}
"""


_HOVER = "Over a chart, the pointer shows values; upright red lines are resumes, restarts, and steps without an update."


def page(
    title: str,
    kicker: str,
    heading: Content,
    lead: str,
    sections: Sequence[Section],
    now: float,
    hover: str = _HOVER,
) -> str:
    """Return a page as text.

    heading: what stands in its h1. now: when it was made, in seconds since the Unix epoch. hover: says what the
    pointer shows.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(STYLE)),
    )
    links = [element("li", element("a", each.title, href=f"#{each.key}")) for each in sections]
    body = element(
        "body",
        element("a", "To the figures", href="#main", class_="skip"),
        element(
            "header",
            element("p", kicker, class_="kicker"),
            element("h1", heading),
            element("p", lead, class_="lead"),
        ),
        element("nav", element("ul", links), aria_label="Sections"),
        element("main", [_section(each) for each in sections], id="main"),
        element("footer", element("p", f"Written by FlowTrain at {moment(now)}. Times are UTC. {hover}")),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(section: Section) -> Markup:
    heading = f"{section.key}-heading"
    return element(
        "section",
        element("h2", section.title, id=heading),
        section.content,
        id=section.key,
        aria_labelledby=heading,
    )


def _policy() -> str:
    """Return the Content-Security-Policy of a page: its own style sheet, pictures inside the page, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'; "
        "object-src 'none'"
    )
