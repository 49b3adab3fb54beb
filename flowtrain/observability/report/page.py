"""A whole page: sections under a heading, with a policy that allows no script and no request."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from flowtrain.observability.report.blocks import Section
from flowtrain.observability.report.markup import Content, element
from flowtrain.observability.report.style import STYLE, policy
from flowtrain.observability.report.units import moment


def page(title: str, kicker: str, heading: Content, lead: str, sections: Sequence[Section], now: float) -> str:
    """Return a page as text. heading: what stands in its h1. now: when it was made, in seconds since the Unix epoch."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
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
        element("footer", element("p", f"Written by FlowTrain at {moment(now)}. Times are UTC. {_HOVER}")),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


_HOVER = "Over a chart, the pointer shows values; upright red lines are resumes, restarts, and steps without an update."


def _section(section: Section) -> Markup:
    heading = f"{section.key}-heading"
    return element(
        "section",
        element("h2", section.title, id=heading),
        section.content,
        id=section.key,
        aria_labelledby=heading,
    )
