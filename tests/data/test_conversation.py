from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowtrain.data.conversation import ConversationEncoder, EncodedText
from flowtrain.data.sources.base import BadSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.types.samples import RejectReason

MakeTokenizer = Callable[[str | None], PreTrainedTokenizerFast]
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
