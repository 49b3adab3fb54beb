"""Renders conversations by a tokenizer's chat template, and finds what the assistant says in them.

The template's ``{% generation %}`` markers enclose the assistant's text. Without markers, the assistant's text is what
its turn adds to the rendered conversation before it (a *prefix rendering*). This is exact if the template never
rewrites earlier turns; templates that do so are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jinja2

from flowtrain.data.sources.base import BadSample
from flowtrain.models.chat_format import chat_format
from flowtrain.types.samples import RejectReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PREFIX_TURNS = 512
"""The most turns of a conversation under a template without markers. The time of its prefix renderings grows with the
square of the turns: about a second for this many."""

# Code points that Unicode never assigns. They stand where the assistant's text starts and ends in a rendering.
_STARTS, _ENDS = "\ufdd1", "\ufdd2"
_EDGES = re.compile(f"[{_STARTS}{_ENDS}]")
RESERVED = _STARTS + _ENDS
"""Characters that a message's content must not have."""

_MARKERS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# The newline is the template's to swallow: the environment drops the first one after a block.
_MACRO = "{% macro flowtrain_said() %}" + _STARTS + "{{ caller() }}" + _ENDS + "{% endmacro %}\n"

Span = tuple[int, int]
"""Characters [start, end) of the rendered conversation."""


class ChatTemplate:
    """One tokenizer's chat template; raises ConfigError if it has none.

    special_tokens: tokens that may end a turn. image_token, image_text: as for ``chat_format``; the second stands for
    an image in a message's content.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, special_tokens: tuple[str, ...], image_token: str, image_text: str
    ) -> None:
        chat = chat_format(tokenizer, image_token, image_text)
        self._special_tokens = special_tokens
        self._has_markers = _MARKERS.search(chat.template) is not None
        self._chat = replace(chat, template=_with_edges(chat.template)) if self._has_markers else chat

    def render(self, messages: Sequence[dict[str, str]]) -> tuple[str, Iterator[Span]]:
        """Return the rendered conversation, and the spans of the assistant's text, in order.

        Without markers each span takes two more renderings, so take no more of them than needed. Both may raise
        BadSample: MALFORMED_SAMPLE if the template refuses the messages, leaves the text of a role out, or renders
        earlier ones differently once later ones follow; OVERSIZED_SAMPLE for a span after ``MAX_PREFIX_TURNS`` turns
        without markers.
        """
        if lost := self._chat.lost & {message["role"] for message in messages}:
            raise _malformed(
                f"the chat template leaves out the text of role {', '.join(sorted(lost))}; set model.chat_template to "
                f"one that renders it, with {self._chat.image_token} for an image"
            )
        text = self._render(messages)
        if self._has_markers:
            text, spans = _without_edges(text)
            return text, iter(spans)
        return text, self._spans_by_prefix(messages, text)

    def _render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
        try:
            return self._chat.render(messages, add_generation_prompt)
        except jinja2.TemplateError as error:
            raise _malformed(f"the chat template refuses the roles {_roles(messages)}: {error}") from error

    def _spans_by_prefix(self, messages: Sequence[dict[str, str]], text: str) -> Iterator[Span]:
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index >= MAX_PREFIX_TURNS:
                raise BadSample(
                    RejectReason.OVERSIZED_SAMPLE,
                    f"{len(messages)} turns are more than the {MAX_PREFIX_TURNS} that a template without markers may "
                    "have; set model.chat_template to one with {% generation %} markers around the assistant's text",
                )
            through = text if index + 1 == len(messages) else self._render(messages[: index + 1])
            start = self._start_of_answer(messages[: index + 1], through)
            if start is None or not text.startswith(through):
                raise _malformed(
                    f"the chat template renders earlier turns differently once later ones follow (roles "
                    f"{_roles(messages)}, seen at turn {index + 1} of {len(messages)}), so the assistant's tokens "
                    "cannot be found exactly; set model.chat_template to one with {% generation %} markers around "
                    "the assistant's text"
                )
            yield start, start + self._turn_length(through[start:])

    def _start_of_answer(self, messages: Sequence[dict[str, str]], through: str) -> int | None:
        """Return where the last message's text starts in the rendering ``through`` it; None if that is not certain."""
        before = self._render(messages[:-1], add_generation_prompt=True)
        if through.startswith(before):
            return len(before)
        if len(messages) > 1:
            return None
        # Some templates put a system prompt of their own in front of the first message, but not in front of none. Then
        # the answer starts where its content does, if the generation prompt stands directly before it.
        nothing = self._render([])
        marked = self._render([{**messages[0], "content": _STARTS + messages[0]["content"]}])
        start, prompt = marked.find(_STARTS), before.removeprefix(nothing)
        is_exact = before.startswith(nothing) and prompt and marked.replace(_STARTS, "") == through
        return start if is_exact and start >= 0 and through[:start].endswith(prompt) else None

    def _turn_length(self, turn: str) -> int:
        """Length of an assistant's turn without white space after its end-of-turn token, which some templates add."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self._special_tokens) else len(turn)


def _with_edges(template: str) -> str:
    """Let the markers write ``_STARTS`` and ``_ENDS``.

    Transformers' own tracking of the markers joins all text before each of them, and is wrong inside of a macro.
    """
    return _MACRO + _MARKERS.sub(
        lambda match: match[1] + ("endcall" if match[2] else "call flowtrain_said()") + match[3], template
    )


def _without_edges(text: str) -> tuple[str, list[Span]]:
    pieces = _EDGES.split(text)
    edges = _EDGES.findall(text)
    if edges != [_STARTS, _ENDS] * (len(edges) // 2):
        raise _malformed("the chat template's {% generation %} markers do not follow each other in pairs")
    spans, end = [], 0
    for number, piece in enumerate(pieces):
        start, end = end, end + len(piece)
        if number % 2:
            spans.append((start, end))
    return "".join(pieces), spans


def _roles(messages: Sequence[dict[str, str]]) -> str:
    names = [message["role"] for message in messages[:8]]
    return ", ".join(names) + (f", ... ({len(messages)} turns)" if len(messages) > len(names) else "")


def _malformed(detail: str) -> BadSample:
    return BadSample(RejectReason.MALFORMED_SAMPLE, detail)
