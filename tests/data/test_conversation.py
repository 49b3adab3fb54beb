from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowtrain.data import conversation
from flowtrain.data.conversation import ConversationEncoder, EncodedText
from flowtrain.data.sources.base import BadSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.types.samples import RejectReason
from tests.data.mutations import OWN_SYSTEM_PROMPT

MakeTokenizer = Callable[[str | None], PreTrainedTokenizerFast]
OUR_TOKENIZER = AutoTokenizer.from_pretrained("assets/tokenizer")
OURS = ConversationEncoder(OUR_TOKENIZER)
TURNS = (Turn("user", "<image>\nWhat?"), Turn("assistant", "Grüße 猫"), Turn("user", "More"), Turn("assistant", "ok"))
# As Qwen3 does: the assistant's thoughts are only kept in its last turn.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ASSISTANT: ' + message['content'] + '\\n' }}{% else %}{{ 'USER: ' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT: ' }}{% endif %}"
)


def targets(tokenizer: PreTrainedTokenizerFast, encoded: EncodedText) -> list[str]:
    """Texts of the runs of tokens that carry loss."""
    assert encoded.ids.dtype == encoded.labels.dtype == np.int32 and encoded.ids.shape == encoded.labels.shape
    carries = encoded.labels != -100
    assert np.array_equal(encoded.labels[carries], encoded.ids[carries])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], carries, [False]]).astype(int)))
    return [tokenizer.decode(encoded.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.fixture(scope="module", params=["markers", "prefix"])
def tokenizer(
    request: pytest.FixtureRequest, byte_tokenizer: MakeTokenizer, chatml: str, chatml_marked: str
) -> PreTrainedTokenizerFast:
    return byte_tokenizer(chatml_marked if request.param == "markers" else chatml)


def test_loss_is_on_answers_and_their_end_of_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = ConversationEncoder(tokenizer).encode(TURNS)
    assert targets(tokenizer, encoded) == ["Grüße 猫<|im_end|>", "ok<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == (
        "<|im_start|>user\n<image>\nWhat?<|im_end|>\n<|im_start|>assistant\nGrüße 猫<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    assert (encoded.ids == tokenizer.convert_tokens_to_ids("<image>")).sum() == 1


def test_ids_and_mask_are_those_of_hugging_face(byte_tokenizer: MakeTokenizer, chatml_marked: str) -> None:
    for tokenizer in (byte_tokenizer(chatml_marked), AutoTokenizer.from_pretrained("assets/tokenizer")):
        encoded = ConversationEncoder(tokenizer, "Be brief.").encode(TURNS)
        messages = [{"role": "system", "content": "Be brief."}]
        messages += [{"role": turn.role, "content": turn.text} for turn in TURNS]
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert encoded.ids.tolist() == theirs["input_ids"]
        assert (encoded.labels != -100).astype(int).tolist() == theirs["assistant_masks"]


_PLAIN = st.text(
    st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1\ufdd2<"), min_size=1, max_size=40
).filter(str.strip)


@given(st.lists(st.tuples(_PLAIN, _PLAIN), min_size=1, max_size=3))
def test_any_text_has_the_ids_and_the_mask_of_hugging_face(rounds: list[tuple[str, str]]) -> None:
    turns = [turn for user, answer in rounds for turn in (Turn("user", user), Turn("assistant", answer))]
    encoded = OURS.encode(turns)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    theirs = OUR_TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.ids.tolist() == theirs["input_ids"]
    assert (encoded.labels != -100).astype(int).tolist() == theirs["assistant_masks"]


def test_markers_in_a_macro_are_found(byte_tokenizer: MakeTokenizer, chatml_marked: str) -> None:
    """Hugging Face's own tracking is off by the text before the macro here."""
    marked = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    assert marked in chatml_marked
    macro = "{% macro said(message) %}" + marked + "{% endmacro %}"
    tokenizer = byte_tokenizer(macro + chatml_marked.replace(marked, "{{ said(message) }}"))
    assert targets(tokenizer, ConversationEncoder(tokenizer).encode(TURNS)) == ["Grüße 猫<|im_end|>", "ok<|im_end|>"]


def test_a_tokenizer_that_changes_texts_in_python_is_used_as_a_whole(
    byte_tokenizer: MakeTokenizer, chatml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = byte_tokenizer(chatml)
    expected = ConversationEncoder(plain).encode([Turn("user", "q"), Turn("assistant", "LOUD")])

    class Quiet(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.upper() if text.isalpha() else text.replace("loud", "LOUD"), **options)

    quiet = Quiet(tokenizer_object=plain.backend_tokenizer)
    quiet.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>"]})
    quiet.chat_template = chatml
    monkeypatch.setattr(conversation, "_TRIALS", ("loud",))
    encoded = ConversationEncoder(quiet).encode([Turn("user", "q"), Turn("assistant", "loud")])
    assert np.array_equal(encoded.ids, expected.ids)


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0"), max_size=30)
_WITH_CONTROL = st.lists(
    st.one_of(
        _TEXT, st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_<|im_end|>end|>", "<image>", "<|im_end|>\n"])
    ),
    max_size=4,
).map("".join)


@settings(deadline=None)
@given(st.lists(st.tuples(_WITH_CONTROL, _WITH_CONTROL.map(lambda text: "a" + text)), min_size=1, max_size=3))
def test_control_tokens_in_texts_stay_text(tokenizer: PreTrainedTokenizerFast, rounds: list[tuple[str, str]]) -> None:
    turns = [turn for user, answer in rounds for turn in (Turn("user", user), Turn("assistant", answer))]
    encoded = ConversationEncoder(tokenizer).encode(turns)
    count = {token: int((encoded.ids == tokenizer.convert_tokens_to_ids(token)).sum())
             for token in ("<|im_start|>", "<|im_end|>", "<image>")}  # fmt: skip
    assert count["<|im_start|>"] == count["<|im_end|>"] == len(turns)
    assert count["<image>"] == sum(turn.text.count("<image>") for turn in turns)
    plain = "".join(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n" for turn in turns)
    assert tokenizer.decode(encoded.ids) == plain
    said = "".join(targets(tokenizer, encoded))
    assert said == "".join(answer.replace("<image>", "") + "<|im_end|>" for _, answer in rounds)


def test_a_family_may_spell_its_image_token_differently(byte_tokenizer: MakeTokenizer, chatml_marked: str) -> None:
    tokenizer = byte_tokenizer(chatml_marked)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]}, replace_extra_special_tokens=False)
    turns = [Turn("user", "<image> is no <|image_pad|>"), Turn("assistant", "yes")]
    encoded = ConversationEncoder(tokenizer, image_token="<|image_pad|>").encode(turns)
    assert (encoded.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 1
    assert "user\n<|image_pad|> is no <|image_pad|>" in tokenizer.decode(encoded.ids)


def test_the_system_prompt_comes_first(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = ConversationEncoder(tokenizer, "Be brief.")
    start = "<|im_start|>system\nBe brief."
    assert tokenizer.decode(encoder.encode(TURNS).ids).startswith(f"{start}<|im_end|>\n<|im_start|>user")
    own = tokenizer.decode(encoder.encode([Turn("system", "In French."), *TURNS]).ids)
    assert own.startswith(f"{start}\n\nIn French.<|im_end|>\n<|im_start|>user")


def test_without_an_end_of_turn_token_the_whole_turn_is_said(byte_tokenizer: MakeTokenizer) -> None:
    tokenizer = byte_tokenizer(VICUNA)
    assert targets(tokenizer, ConversationEncoder(tokenizer).encode(TURNS)) == ["Grüße 猫\n", "ok\n"]


@pytest.mark.parametrize(
    ("turns", "detail"),
    [
        ([Turn("user", "q"), Turn("assistant", " \n")], "turn 2 of 2 is blank"),
        ([Turn("user", "q"), Turn("assistant", "a"), Turn("user", "q"), Turn("assistant", "")], "turn 4 of 4"),
        ([Turn("user", "q"), Turn("assistant", "<image>")], "blank"),
        ([Turn("user", "q")], "none of 1 turns"),
        ([], "none of 0 turns"),
    ],
)
def test_empty_answers(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], detail: str) -> None:
    with pytest.raises(BadSample, match=detail) as caught:
        ConversationEncoder(tokenizer).encode(turns)
    assert caught.value.reason is RejectReason.EMPTY_ANSWER


def test_what_an_assistant_says_first_is_found(byte_tokenizer: MakeTokenizer) -> None:
    tokenizer = byte_tokenizer(OWN_SYSTEM_PROMPT)
    encoder = ConversationEncoder(tokenizer)
    turns = [Turn("assistant", "  Hello "), Turn("user", "q"), Turn("assistant", "a")]
    assert targets(tokenizer, encoder.encode(turns)) == ["  Hello <|im_end|>", "a<|im_end|>"]
    first = encoder.encode(turns[:1])
    assert tokenizer.decode(first.ids).endswith("of use.<|im_end|>\n<|im_start|>assistant\n  Hello <|im_end|>\n")


@pytest.mark.parametrize(
    "change",
    [
        ("message['content']", "message['content'] | trim"),  # where the content starts is not where the answer does
        ("message['content']", "'> ' + message['content']"),
    ],
)
def test_an_answer_that_is_not_found_exactly_is_the_samples_fault(
    byte_tokenizer: MakeTokenizer, change: tuple[str, str]
) -> None:
    encoder = ConversationEncoder(byte_tokenizer(OWN_SYSTEM_PROMPT.replace(*change)))
    with pytest.raises(BadSample, match="roles assistant, user, seen at turn 1 of 2") as caught:
        encoder.encode([Turn("assistant", " a"), Turn("user", "q")])
    assert caught.value.reason is RejectReason.MALFORMED_SAMPLE


def test_a_template_that_rewrites_only_some_conversations(byte_tokenizer: MakeTokenizer, chatml: str) -> None:
    """As it is with turns of a tool: the first answer stands only until another turn of the system follows."""
    template = chatml.replace(
        "{% for message in messages %}", "{% for message in messages %}{% if messages[2:] | map(attribute='role') "
        "| select('equalto', 'system') | list and loop.index0 == 1 %}{% continue %}{% endif %}"
    )  # fmt: skip
    encoder = ConversationEncoder(byte_tokenizer(template))
    turns = [Turn("user", "q"), Turn("assistant", "a"), Turn("system", "s"), Turn("user", "q"), Turn("assistant", "b")]
    encoder.encode(turns[:2])
    with pytest.raises(BadSample, match="user, assistant, system, user, assistant, seen at turn 2 of 5.*generation"):
        encoder.encode(turns)


def test_a_very_long_conversation_without_markers(byte_tokenizer: MakeTokenizer, chatml: str) -> None:
    tokenizer = byte_tokenizer(chatml)
    encoder = ConversationEncoder(tokenizer)
    turns = [Turn("user", "q"), Turn("assistant", "a")] * 600
    with pytest.raises(BadSample, match="1200 turns are more than the 512 .*model.chat_template") as caught:
        encoder.encode(turns)
    assert caught.value.reason is RejectReason.OVERSIZED_SAMPLE
    assert targets(tokenizer, encoder.encode(turns, max_labels=100)) == ["a<|im_end|>"] * 4, "as far as it is labelled"


@given(st.lists(st.tuples(_WITH_CONTROL, _WITH_CONTROL.map(lambda text: "a" + text)), min_size=1, max_size=4))
def test_labels_may_end_anywhere(tokenizer: PreTrainedTokenizerFast, rounds: list[tuple[str, str]]) -> None:
    turns = [turn for user, answer in rounds for turn in (Turn("user", user), Turn("assistant", answer))]
    encoder = ConversationEncoder(tokenizer)
    whole = encoder.encode(turns)
    for limit in {1, 2, len(whole.ids) // 3, len(whole.ids) // 2, len(whole.ids) - 1}:
        cut = encoder.encode(turns, limit)
        assert np.array_equal(cut.ids, whole.ids)
        assert np.array_equal(cut.labels[:limit], whole.labels[:limit]) and (cut.labels[limit:] == -100).all()


def test_a_template_that_refuses_the_turns(byte_tokenizer: MakeTokenizer, chatml: str) -> None:
    strict = "{% if messages and messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(BadSample, match="user first") as caught:
        ConversationEncoder(byte_tokenizer(strict + chatml)).encode([Turn("assistant", "a")])
    assert caught.value.reason is RejectReason.MALFORMED_SAMPLE
    no_system = "{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"data\.system_prompt.*no system"):
        ConversationEncoder(byte_tokenizer(no_system + chatml), "Be brief.")


def test_a_template_that_loses_an_image(byte_tokenizer: MakeTokenizer, chatml: str) -> None:
    loses = chatml.replace("message['content'] +", "message['content'].split('think')[-1] +")
    turns = [Turn("user", "<image>think"), Turn("assistant", "a")]
    with pytest.raises(BadSample, match="1 <image> in the turns became 0") as caught:
        ConversationEncoder(byte_tokenizer(loses)).encode(turns)
    assert caught.value.reason is RejectReason.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "model.chat_template: .* has no chat template"),
        (FORGETFUL, r"model.chat_template: .*turn 2 of 4.*generation"),
        ("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}", "user text"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m['content'] }}{% endfor %}",
            "assistant text .* is outside",
        ),
    ],
)
def test_templates_that_cannot_give_exact_labels(
    byte_tokenizer: MakeTokenizer, template: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ConversationEncoder(byte_tokenizer(template))


def test_a_tokenizer_without_the_image_token(byte_tokenizer: MakeTokenizer, chatml: str) -> None:
    with pytest.raises(ConfigError, match=r"model.image_token: '<picture>' is not an added token"):
        ConversationEncoder(byte_tokenizer(chatml), image_token="<picture>")
