"""Whatever text comes from data, it stays text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from flowtrain.observability.report.markup import element, join, plain_text
from tests.report.parsed import parsed
from tests.report.runs import HOSTILE

TEXTS = st.text(st.characters(), max_size=60) | st.sampled_from([HOSTILE, "</p>", "<!--", "]]>", "&lt;", "\ud800"])


@given(TEXTS)
def test_any_text_is_read_back_as_the_same_text(text: str) -> None:
    page = parsed(str(element("p", text, title=text)))
    (paragraph,) = page.children
    assert not isinstance(paragraph, str)
    assert paragraph.text == plain_text(text)
    assert paragraph.attributes["title"] == plain_text(text)
    assert not paragraph.all(), "the text became elements"


@given(TEXTS)
def test_a_page_can_be_written_as_utf8_and_shows_text_as_it_is(text: str) -> None:
    written = plain_text(text)
    written.encode("utf-8")
    assert not set(written) & set("\x00\x1b\r\u202e\u2066\ufeff")
    assert plain_text(written) == written
    kept = [letter for letter in text if letter.isalnum() and letter not in "\ufeff"]
    assert [letter for letter in written if letter.isalnum()] == kept


@given(st.lists(TEXTS, max_size=5))
def test_contents_are_joined_in_order_and_nested_lists_are_flat(texts: list[str]) -> None:
    nested = [texts[:1], [texts[1:2], None, False], (each for each in texts[2:])]
    assert parsed(str(element("p", nested))).text == "".join(map(plain_text, texts))
    assert isinstance(join(nested), Markup)


def test_attributes_get_the_names_of_html() -> None:
    shown = element("path", class_="a b", aria_label="x", viewBox="0 0 1 1", name="n", hidden=True, id=None, on=False)
    assert shown == '<path class="a b" aria-label="x" viewBox="0 0 1 1" name="n" hidden></path>'
    assert element("img", src="data:,", width=0) == '<img src="data:," width="0">'
    assert element("p", element("b", "<"), "<", 1) == "<p><b>&lt;</b>&lt;1</p>"
