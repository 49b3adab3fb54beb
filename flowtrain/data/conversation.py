"""Turns conversations into token ids and labels by the tokenizer's chat template; only assistant tokens carry loss.

Control tokens that a data set's text spells out (``<|im_end|>``) stay text: the rendered conversation is cut inside
each of them before it is tokenised. Only ``<image>`` becomes a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flowtrain.data.chat_template import RESERVED, ChatTemplate, Span
from flowtrain.data.sources.base import IMAGE_PLACEHOLDER, BadSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.types.samples import RejectReason

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

IGNORE_LABEL = -100
"""Label of a token that carries no loss."""

# A code point that Unicode never assigns: it marks where the text is cut, and no token contains it.
_CUT = "\ufdd0"
_PROBE = (
    Turn("user", "first question"),
    Turn("assistant", "first answer"),
    Turn("user", "second question"),
    Turn("assistant", "second answer"),
)
# What a tokenizer's Python code might treat differently: white space, special tokens, other scripts.
_TRIALS = ("", " a  b\n", "first <|im_end|> Second\t\r\n 12,345 <image></s>", "Grüße 猫 😀")


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A tokenised conversation before images are expanded: ids and unshifted labels, int32 ``[num_tokens]`` each."""

    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]


class ConversationEncoder:
    """Encodes conversations with one tokenizer, system prompt and image token.

    image_token: the tokenizer's spelling of the token that ``<image>`` becomes. image_text: the whole text that it
    becomes, of special tokens with the image token once among them; None: the image token alone. Raises ConfigError,
    before any data is read, if tokenizer or chat template cannot give exact labels.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None = None,
        image_token: str = IMAGE_PLACEHOLDER,
        *,
        image_text: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._image_text = image_text or image_token
        self._image_token_id = _image_token_id(tokenizer, image_token)
        self._image_ids = np.array([self._image_token_id])
        if self._image_text != image_token:
            self._image_ids = np.unique(tokenizer.encode(self._image_text, add_special_tokens=False))
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {image_token}
        # Only tokens of two characters or more can be cut; the lookahead also finds overlapping ones.
        self._specials = tuple(sorted(token for token in special if len(token) > 1))
        self._control_tokens = re.compile("(?=(?:" + "|".join(map(re.escape, self._specials)) + "))(.)", re.DOTALL)
        self._template = ChatTemplate(tokenizer, self._specials, image_token, self._image_text)
        self._tokenise_piece = _tokenise_piece(tokenizer)
        self._probe()

    def encode(self, turns: Sequence[Turn], max_labels: int | None = None) -> EncodedText:
        """Tokenise a conversation; max_labels: tokens after so many get no label (None: all get theirs).

        Raises BadSample:

        - EMPTY_ANSWER if an assistant turn is blank, or no token carries loss and all have their labels;
        - MALFORMED_SAMPLE or OVERSIZED_SAMPLE as ``ChatTemplate.render``;
        - PLACEHOLDER_MISMATCH if the template loses an ``<image>``.
        """
        _require_answers(turns)
        text, spans = self._template.render(self._messages(turns))
        ids, offsets = self._tokenise(text)
        is_image = ids == self._image_token_id
        num_placeholders = sum(turn.text.count(IMAGE_PLACEHOLDER) for turn in turns)
        if is_image.sum() != num_placeholders:
            raise BadSample(
                RejectReason.PLACEHOLDER_MISMATCH,
                f"{num_placeholders} {IMAGE_PLACEHOLDER} in the turns became {is_image.sum()} image tokens",
            )
        num_labelled = len(ids) if max_labels is None else min(max_labels, len(ids))
        is_whole = num_labelled == len(ids)
        if not is_whole:
            end = offsets[num_labelled - 1, 1]
            spans = takewhile(lambda span: span[0] < end, spans)
        is_of_image = is_image if len(self._image_ids) == 1 else np.isin(ids, self._image_ids)
        carries_loss = _inside(offsets, list(spans)) & ~is_of_image
        carries_loss[num_labelled:] = False
        labels = np.where(carries_loss, ids, IGNORE_LABEL).astype(np.int32)
        if is_whole and not (labels[1:] != IGNORE_LABEL).any():
            raise BadSample(RejectReason.EMPTY_ANSWER, "no token of the conversation carries loss")
        return EncodedText(ids, labels)

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Turns in the template's format; the run's system prompt goes in front of the sample's system prompt."""
        messages = [{"role": turn.role, "content": self._protected(turn.text)} for turn in turns]
        if self._system_prompt is None:
            return messages
        if messages and messages[0]["role"] == "system":
            own = messages.pop(0)["content"]
            return [{"role": "system", "content": f"{self._system_prompt}\n\n{own}"}, *messages]
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _protected(self, text: str) -> str:
        """Mark where to cut control tokens in a text, and replace ``<image>`` by the text that stands for an image."""
        for reserved in _CUT + RESERVED:
            text = text.replace(reserved, "")
        pieces = text.split(IMAGE_PLACEHOLDER)
        if any(token in piece for piece in pieces for token in self._specials):
            pieces = [self._control_tokens.sub(rf"\1{_CUT}", piece) for piece in pieces]
        return self._image_text.join(pieces)

    def _tokenise(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return ids ``[n]`` and the characters ``[n, 2]`` of ``text`` that each one covers.

        A text without cuts is one piece. SentencePiece tokenizers may begin each further piece with a space.
        """
        ids: list[int] = []
        offsets = []
        start = 0
        for piece in text.split(_CUT):
            piece_ids, characters = self._tokenise_piece(piece)
            ids += piece_ids
            offsets.append(np.array(characters, dtype=np.int64).reshape(-1, 2) + start)
            start += len(piece) + len(_CUT)
        return np.array(ids, dtype=np.int32), np.concatenate(offsets)

    def _probe(self) -> None:
        """Check the template with a short conversation: its spans must contain the answers and no question."""
        try:
            text, rendered_spans = self._template.render(self._messages(_PROBE))
            spans = list(rendered_spans)
        except Exception as error:  # a template is a program of somebody else
            with_prompt = "" if self._system_prompt is None else " (with data.system_prompt as the system turn)"
            what = error.detail if isinstance(error, BadSample) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"model.chat_template: fails on user and assistant turns{with_prompt}: {what}; choose another template"
            ) from error
        marked = "".join(text[start:end] for start, end in spans)
        for turn in _PROBE:
            if (turn.text in marked) != (turn.role == "assistant"):
                raise ConfigError(
                    "model.chat_template: its {% generation %} markers must enclose exactly the assistant's text, but "
                    f"{turn.role} text {turn.text!r} is {'in' if turn.text in marked else 'outside'} them; fix the "
                    "markers or choose another template"
                )


def _tokenise_piece(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], tuple[list[int], list[Span]]]:
    """Return what gives a text's ids and the characters of each: the tokenizer's Rust code if it does so alone.

    The Python code around it takes a tenth of the time, but some tokenizers change a text there.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer: {tokenizer.name_or_path or type(tokenizer).__name__} has no fast tokenizer, which is "
            "needed to find the assistant's tokens; choose a directory with a tokenizer.json"
        )

    def whole(text: str) -> tuple[list[int], list[Span]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def alone(text: str) -> tuple[list[int], list[Span]]:
        encoded = backend.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    backend: Tokenizer = tokenizer.backend_tokenizer
    # The first call also turns off truncation and padding, which the Rust code would keep from its file.
    return alone if all(whole(text) == alone(text) for text in _TRIALS) else whole


def _image_token_id(tokenizer: PreTrainedTokenizerBase, image_token: str) -> int:
    token_id = tokenizer.get_added_vocab().get(image_token)
    if token_id is None:
        raise ConfigError(
            f"model.image_token: {image_token!r} is not an added token of tokenizer {tokenizer.name_or_path!r}, so it "
            "would become several tokens; name an added token, or add this one to the tokenizer"
        )
    return int(token_id)


def _require_answers(turns: Sequence[Turn]) -> None:
    answers = [(index, turn.text) for index, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        raise BadSample(RejectReason.EMPTY_ANSWER, f"none of {len(turns)} turns is the assistant's")
    for index, text in answers:
        if not text.replace(IMAGE_PLACEHOLDER, "").strip():
            raise BadSample(RejectReason.EMPTY_ANSWER, f"assistant turn {index + 1} of {len(turns)} is blank")


def _inside(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return which tokens have a character in a span; bool ``[n]``. Spans are in order and do not overlap.

    ``return_assistant_tokens_mask`` is not used for this: if a span's last or first character belongs to no token, it
    marks everything to the end, or nothing.
    """
    first, last = (np.array(edges, dtype=np.int64) for edges in zip((0, 0), *spans, strict=True))
    # The last span that starts before the token's end is the only one that can reach into it.
    nearest = np.maximum(np.searchsorted(first, offsets[:, 1]) - 1, 0)
    inside: npt.NDArray[np.bool_] = (first[nearest] < offsets[:, 1]) & (last[nearest] > offsets[:, 0])
    return inside
