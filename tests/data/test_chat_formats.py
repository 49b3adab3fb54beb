"""An export's processor renders the same messages, as texts or as lists of parts, to the text that was trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoProcessor, LlavaConfig, PreTrainedTokenizerFast, ProcessorMixin, SiglipImageProcessorPil

from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sources.base import BadSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.models.chat_format import chat_format, exported_template
from flowtrain.models.export import build_processor, write_processor
from flowtrain.types.samples import RejectReason
from tests.data.conftest import CHATML, CHATML_MARKED
from tests.data.mutations import OWN_SYSTEM_PROMPT, STRICT

ROOT = Path(__file__).parents[2]
MakeTokenizer = Callable[[str | None], PreTrainedTokenizerFast]
Message = dict[str, Any]

# In the structure of the templates that the names say.
LLAMA3 = (
    "{% for message in messages %}{% set said = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set said = bos_token + said %}{% endif %}"
    "{{ said }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# It cuts the system's turn off, as Llama-3.1's does, so that the name ``messages`` is assigned to twice.
SYSTEM_FIRST = (
    "{%- if messages and messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = 'be of use' %}{%- endif %}"
    "{{- '<|im_start|>' + system + '<|im_end|>' }}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + ':' + message.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant:' }}{%- endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{# images come first #}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ 'IMAGE\n' }}{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_VL = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}{{ '<|vision_start|>IMAGE<|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INTERNVL = QWEN_VL.replace("<|vision_start|>IMAGE<|vision_end|>", "IMAGE\n")
# Trims every part of its own, as Gemma's does: parts side by side are not their text as a whole.
TRIMMING = QWEN_VL.replace("part.text", "part.text | trim").replace(
    "{{ message.content }}", "{{ message.content | trim }}"
)
BARE = QWEN_VL.replace("<|vision_start|>IMAGE<|vision_end|>", "IMAGE")
# The system's turn stands apart, and assistants give no images.
QWEN3_VL = (
    "{%- if messages and messages[0].role == 'system' %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].content is string %}{{- messages[0].content }}{%- else %}"
    "{%- for part in messages[0].content %}{%- if 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'system' %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if message.role == 'user' and (part.type == 'image' or 'image' in part) %}"
    "{{- '<|vision_start|>IMAGE<|vision_end|>' }}{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# It writes the system's first part, and then all of them, as in every turn.
VICUNA_LLAVA = LLAVA.replace(
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}",
    "{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }}"
    "{% else %}{{ message['role'].upper() + ': ' }}{% endif %}",
)
# What the system says goes before the first question; of a list only the first part.
GEMMA3 = (
    "{% if messages and messages[0].role == 'system' %}{% if messages[0].content is string %}"
    "{% set prefix = messages[0].content + '\n\n' %}{% else %}{% set prefix = messages[0].content[0].text + '\n\n' %}"
    "{% endif %}{% set messages = messages[1:] %}{% else %}{% set prefix = '' %}{% endif %}"
    "{% for message in messages %}{{ '<start_of_turn>' + message.role + '\n' + (prefix if loop.first else '') }}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'IMAGE' }}{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
USERS_LISTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'user' %}"
    "{% for part in message['content'] %}{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As a text it loses what users say, as a list their images.
USERS_LOST = CHATML.replace(
    "message['content']",
    "(message['content'] if message['role'] == 'assistant' else message['content'] | map(attribute='text') | join)",
)


def with_own_system(template: str, shown: str) -> str:
    """A template that renders the system's turn by itself. shown: an expression of ``content``."""
    return (
        "{% if messages and messages[0].role == 'system' %}{% set content = messages[0].content %}"
        "{{ '<|im_start|>system\n' }}{{ " + shown + " }}{{ '<|im_end|>\n' }}"
        "{% set messages = messages[1:] %}{% endif %}" + template
    )


PRINTED, ADDED, FIRST_PART = "content", "'be ' + content", "content[0].text"
AS_JSON = "content if content is string else content | tojson"
ALL = frozenset({"system", "user", "assistant"})
DIALOGUE, OF_USERS, OF_SYSTEM = (frozenset(roles) for roles in (("user", "assistant"), ("user",), ("system",)))


@dataclass(frozen=True)
class Template:
    text: str
    """``IMAGE`` stands for the image token."""
    list_roles: frozenset[str] = frozenset()
    """Whose contents are lists in training."""
    is_changed: bool = False
    """An export has another one."""
    image_token: str = "<image>"
    framed: str = "IMAGE"
    """What an image becomes, by template or processor."""
    processor_frames: bool = False
    """Not the template, but the processor adds the frame, when it expands the image token."""
    takes_system: bool = True
    """It does not refuse a turn of the system."""

    @property
    def image_text(self) -> str:
        return self.framed.replace("IMAGE", self.image_token)

    @property
    def placeholder(self) -> str:
        return self.image_token if self.processor_frames else self.image_text


PAD = {"image_token": "<|image_pad|>", "framed": "<|vision_start|>IMAGE<|vision_end|>"}
CONTEXT = {"image_token": "<IMG_CONTEXT>", "framed": "<img>IMAGE</img>", "processor_frames": True}
TEMPLATES = {
    "chatml": Template(CHATML, is_changed=True),
    "chatml with markers": Template(CHATML_MARKED, is_changed=True),
    "smollm2": Template(OWN_SYSTEM_PROMPT, is_changed=True),
    "llama3": Template(LLAMA3, is_changed=True),
    "system first": Template(SYSTEM_FIRST, is_changed=True),
    "mistral": Template(STRICT, is_changed=True, takes_system=False),
    "ours": Template((ROOT / "assets" / "tokenizer" / "chat_template.jinja").read_text()),
    "llava": Template(LLAVA, ALL, is_changed=True),
    "trimming": Template(TRIMMING, ALL, is_changed=True),
    "qwen-vl": Template(QWEN_VL, **PAD),
    "qwen3-vl": Template(QWEN3_VL, **PAD),
    # The run does not know that the template frames images.
    "qwen-vl unframed": Template(QWEN_VL, ALL, image_token="<|image_pad|>"),
    # The template writes another image token than the run has, so texts are the only way.
    "qwen-vl for llava": Template(QWEN_VL.replace("IMAGE", "<|image_pad|>"), is_changed=True),
    "chatml for qwen-vl": Template(CHATML_MARKED, is_changed=True, **PAD),
    "bare for qwen-vl": Template(BARE, is_changed=True, **PAD),
    "bare for internvl": Template(BARE, **CONTEXT),
    "internvl": Template(INTERNVL, ALL, is_changed=True, **CONTEXT),
    "chatml for internvl": Template(CHATML, is_changed=True, **CONTEXT),
    "llava for internvl": Template(LLAVA, ALL, is_changed=True, **CONTEXT),
    "vicuna's llava": Template(VICUNA_LLAVA, ALL, is_changed=True),
    "gemma3": Template(GEMMA3, ALL, is_changed=True),
    "lists of users": Template(USERS_LISTS, OF_USERS, is_changed=True),
    "qwen-vl, prints a system's list": Template(with_own_system(QWEN_VL, PRINTED), is_changed=True, **PAD),
    "qwen-vl, prints a system's json": Template(with_own_system(QWEN_VL, AS_JSON), is_changed=True, **PAD),
    "internvl, prints a system's list": Template(with_own_system(INTERNVL, PRINTED), DIALOGUE, True, **CONTEXT),
    "llava, fails on a system's list": Template(with_own_system(LLAVA, ADDED), DIALOGUE, is_changed=True),
    "llava, a system's first part": Template(with_own_system(LLAVA, FIRST_PART), ALL, is_changed=True),
    "chatml, a system's first part": Template(with_own_system(CHATML, FIRST_PART), OF_SYSTEM, is_changed=True),
}


@dataclass
class Exported:
    template: Template
    tokenizer: PreTrainedTokenizerFast
    encoder: ConversationEncoder
    processor: ProcessorMixin
    """Written and loaded again."""

    def trained(self, turns: Sequence[Turn]) -> list[int]:
        ids: list[int] = self.encoder.encode(turns).ids.tolist()
        return ids

    def rendered(self, messages: Sequence[Message], **options: Any) -> list[int]:
        text = self.processor.apply_chat_template(list(messages), **options)
        if self.template.processor_frames:
            text = text.replace(self.template.image_token, self.template.image_text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def tokenizer_of(make: MakeTokenizer, template: Template) -> PreTrainedTokenizerFast:
    tokenizer = make(template.text.replace("IMAGE", template.image_token))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokens = [template.image_token, "<|vision_start|>", "<|vision_end|>", "<img>", "</img>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    return tokenizer


def encoder_of(tokenizer: PreTrainedTokenizerFast, template: Template) -> ConversationEncoder:
    return ConversationEncoder(tokenizer, image_token=template.image_token, image_text=template.image_text)


def written(tokenizer: PreTrainedTokenizerFast, template: Template, to: Path) -> ProcessorMixin:
    """The processor of an export, loaded again."""
    processor = build_processor(
        LlavaConfig(),
        SiglipImageProcessorPil(),
        tokenizer,
        patch_size=14,
        num_prefix_tokens=0,
        image_token=template.image_token,
    )
    write_processor(processor, exported_template(tokenizer, template.image_token, template.placeholder), to)
    return AutoProcessor.from_pretrained(to)


@pytest.fixture(scope="module", params=TEMPLATES)
def exported(
    request: pytest.FixtureRequest, byte_tokenizer: MakeTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    template = TEMPLATES[request.param]
    tokenizer = tokenizer_of(byte_tokenizer, template)
    processor = written(tokenizer, template, tmp_path_factory.mktemp("export"))
    return Exported(template, tokenizer, encoder_of(tokenizer, template), processor)


def test_the_form_is_found_and_only_what_is_needed_is_added(exported: Exported) -> None:
    template = exported.template
    chat = chat_format(exported.tokenizer, template.image_token, template.image_text)
    assert chat.list_roles == template.list_roles and not chat.lost
    own = template.text.replace("IMAGE", template.image_token)
    assert exported.processor.chat_template == chat.exported(template.placeholder)
    assert (exported.processor.chat_template != own) == template.is_changed
    assert exported.processor.chat_template.endswith(own)


_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1\ufdd2<"), max_size=20) | st.sampled_from(
    [" ", "\n", "  a", "b \n", "{{ 1 / 0 }}", "'", '"', "\\"]
)
_IMAGE = None
_PARTS = st.lists(_TEXTS | st.just(_IMAGE), max_size=5)
_ANSWERS = st.lists(_TEXTS, max_size=3).map(lambda texts: ["a", *texts])
_SYSTEM = st.none() | st.lists(_TEXTS, max_size=2).map(lambda texts: ["s", *texts])
_ROUNDS = st.tuples(_SYSTEM, st.lists(st.tuples(_PARTS, _ANSWERS), min_size=1, max_size=3))
Said = list[tuple[str, list[str | None]]]
"""Role and pieces of each turn; None is an image."""
Rounds = tuple[list[str] | None, list[tuple[list[str | None], list[str]]]]
"""What the system says, and the questions with their answers."""


def conversation(rounds: Rounds, template: Template) -> Said:
    system, dialogue = rounds
    said: Said = [turn for asked, answer in dialogue for turn in (("user", asked), ("assistant", list(answer)))]
    return said if system is None or not template.takes_system else [("system", list(system)), *said]


def turns_of(said: Said) -> list[Turn]:
    return [Turn(role, joined(parts, "<image>")) for role, parts in said]


def joined(parts: Sequence[str | None], image: str) -> str:
    return "".join(image if part is _IMAGE else part for part in parts)


def as_parts(said: Said) -> list[Message]:
    return [
        {
            "role": role,
            "content": [{"type": "image"} if part is _IMAGE else {"type": "text", "text": part} for part in parts],
        }
        for role, parts in said
    ]


def as_texts(said: Said, image: str) -> list[Message]:
    return [{"role": role, "content": joined(parts, image)} for role, parts in said]


@given(rounds=_ROUNDS)
def test_lists_of_parts_are_rendered_as_they_were_trained(exported: Exported, rounds: Rounds) -> None:
    said = conversation(rounds, exported.template)
    assert exported.rendered(as_parts(said)) == exported.trained(turns_of(said))


@given(rounds=_ROUNDS)
def test_texts_are_rendered_as_they_were_trained(exported: Exported, rounds: Rounds) -> None:
    template = exported.template
    said = conversation(rounds, template)
    if template.list_roles and not template.is_changed:
        # A stock template stays as it is: in a text its people write what it writes for a part.
        said = [(role, [part for part in parts if part is not _IMAGE]) for role, parts in said]
    messages = as_texts(said, template.placeholder)
    assert exported.rendered(messages) == exported.trained(turns_of(said))
    mixed = [*as_parts(said[:1]), *messages[1:]]
    assert exported.rendered(mixed) == exported.trained(turns_of(said))


@given(rounds=_ROUNDS)
def test_a_prompt_is_the_beginning_of_what_was_trained(exported: Exported, rounds: Rounds) -> None:
    said = conversation(rounds, exported.template)
    prompt = exported.rendered(as_parts(said)[:-1], add_generation_prompt=True)
    assert prompt == exported.trained(turns_of(said))[: len(prompt)]


def test_what_each_role_says_is_trained_as_a_text(exported: Exported) -> None:
    """Neither left out nor printed as a list."""
    system = [Turn("system", "be brief")] if exported.template.takes_system else []
    text = exported.tokenizer.decode(
        exported.trained([*system, Turn("user", "What is <image>?"), Turn("assistant", "a cat")])
    )
    assert all(said in text for said in ("What is", "a cat", *[turn.text for turn in system]))
    assert not any(mark in text for mark in ("'text'", '"text"', "'type'", '"type"', "[{"))


def test_the_readmes_messages_are_rendered_as_a_row_without_places_is_trained(exported: Exported) -> None:
    """A row that names no places of its images, as in FineVision, has them in a line before its first question."""
    (line,) = re.findall(r"^messages = (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    messages = ast.literal_eval(line)
    (question,) = [part["text"] for part in messages[0]["content"] if part["type"] == "text"]
    turns = [Turn("user", f"<image>{question}"), Turn("assistant", "A cat.")]
    prompt = exported.rendered(messages, add_generation_prompt=True)
    assert question.startswith("\n") and prompt == exported.trained(turns)[: len(prompt)]


@pytest.mark.parametrize("name", ["qwen-vl", "qwen-vl unframed", "chatml for qwen-vl"])
def test_images_are_framed_in_training_by_whoever_knows_how(byte_tokenizer: MakeTokenizer, name: str) -> None:
    tokenizer = tokenizer_of(byte_tokenizer, TEMPLATES[name])
    encoded = encoder_of(tokenizer, TEMPLATES[name]).encode(
        [Turn("user", "Is <image> a <|image_pad|>?"), Turn("assistant", "yes")]
    )
    assert tokenizer.decode(encoded.ids) == (
        "<|im_start|>user\nIs <|vision_start|><|image_pad|><|vision_end|> a <|image_pad|>?<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert (encoded.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 1
    assert tokenizer.decode(encoded.ids[encoded.labels != -100]) == "yes<|im_end|>"


@pytest.mark.parametrize("asked", ["<image>?", "<image>\n?"])
@pytest.mark.parametrize("name", ["internvl", "chatml for internvl"])
def test_a_frame_of_the_processor_is_put_where_the_template_writes_an_image(
    byte_tokenizer: MakeTokenizer, name: str, asked: str
) -> None:
    """InternVL's template ends an image's line itself, as ``<image>`` in texts has it: one newline, not two."""
    tokenizer = tokenizer_of(byte_tokenizer, TEMPLATES[name])
    encoded = encoder_of(tokenizer, TEMPLATES[name]).encode([Turn("user", asked), Turn("assistant", "yes")])
    expected = "<image>\n?" if name == "internvl" else asked
    first = tokenizer.decode(encoded.ids).split("<|im_end|>")[0]
    assert first == "<|im_start|>user\n" + expected.replace("<image>", "<img><IMG_CONTEXT></img>")


def test_a_template_that_takes_lists_alone_can_be_trained(byte_tokenizer: MakeTokenizer) -> None:
    tokenizer = tokenizer_of(byte_tokenizer, TEMPLATES["llava"])
    encoded = ConversationEncoder(tokenizer).encode([Turn("user", "Look:<image>\nWhat?"), Turn("assistant", "A cat.")])
    assert tokenizer.decode(encoded.ids) == "USER: <image>\nLook: What? ASSISTANT: A cat. "
    assert tokenizer.decode(encoded.ids[encoded.labels != -100]) == "A cat. "


def test_what_a_template_loses_is_refused(byte_tokenizer: MakeTokenizer) -> None:
    users = tokenizer_of(byte_tokenizer, Template(USERS_LOST))
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*leaves out the text of role user.*<image>"):
        ConversationEncoder(users)
    without_system = CHATML.replace("for message in messages", "for message in messages if message.role != 'system'")
    tokenizer = tokenizer_of(byte_tokenizer, Template(without_system))
    with pytest.raises(ConfigError, match=r"data\.system_prompt.*leaves out the text of role system"):
        ConversationEncoder(tokenizer, "Be brief.")
    encoder = ConversationEncoder(tokenizer)
    dialogue = [Turn("user", "q"), Turn("assistant", "a")]
    encoder.encode(dialogue)
    with pytest.raises(BadSample, match="leaves out the text of role system") as caught:
        encoder.encode([Turn("system", "s"), *dialogue])
    assert caught.value.reason is RejectReason.MALFORMED_SAMPLE


def test_an_image_that_a_template_loses_is_the_samples_fault(byte_tokenizer: MakeTokenizer) -> None:
    users_only = QWEN_VL.replace("part.type == 'image' or 'image' in part", "message.role == 'user' and not part.text")
    template = Template(users_only, image_token="<|image_pad|>")
    encoder = encoder_of(tokenizer_of(byte_tokenizer, template), template)
    encoder.encode([Turn("user", "<image>"), Turn("assistant", "here")])
    with pytest.raises(BadSample, match="1 <image> in the turns became 0 image tokens") as caught:
        encoder.encode([Turn("user", "draw"), Turn("assistant", "<image> here")])
    assert caught.value.reason is RejectReason.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_export_of_an_export_has_the_same_template(byte_tokenizer: MakeTokenizer, name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = tokenizer_of(byte_tokenizer, template)
    first = chat_format(tokenizer, template.image_token, template.image_text)
    tokenizer.chat_template = first.exported(template.placeholder)
    assert chat_format(tokenizer, template.image_token, template.image_text) == first
    # What was exported takes both forms only with the image token that it was exported for.
    renamed = chat_format(tokenizer, "<|eot_id|>")
    assert not renamed.list_roles and renamed.template == tokenizer.chat_template != renamed.exported("<|eot_id|>")


def test_the_other_templates_of_a_tokenizer_stay(byte_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_tokenizer, TEMPLATES["chatml"])
    alone = exported_template(tokenizer, "<image>")
    tokenizer.chat_template = {"default": CHATML, "tool_use": LLAMA3}
    processor = written(tokenizer, TEMPLATES["chatml"], tmp_path)
    assert processor.chat_template == {"default": alone, "tool_use": LLAMA3}
    tokenizer.chat_template = None
    assert exported_template(tokenizer, "<image>") is None


def test_the_assistants_tokens_can_be_found_in_an_export_too(byte_tokenizer: MakeTokenizer) -> None:
    tokenizer = tokenizer_of(byte_tokenizer, TEMPLATES["chatml with markers"])
    encoded = ConversationEncoder(tokenizer).encode([Turn("user", "<image>?"), Turn("assistant", "yes")])
    tokenizer.chat_template = exported_template(tokenizer, "<image>")
    messages = as_parts([("user", [_IMAGE, "?"]), ("assistant", ["yes"])])
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.ids.tolist() == theirs["input_ids"]
    assert (encoded.labels != -100).astype(int).tolist() == theirs["assistant_masks"]


def test_other_parts_are_refused_not_dropped(byte_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    template = TEMPLATES["smollm2"]
    processor = written(tokenizer_of(byte_tokenizer, template), template, tmp_path)
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]}]
    with pytest.raises(jinja2.TemplateError, match="parts of type text and image, not video"):
        processor.apply_chat_template(messages)
    calls = [{"role": "user", "content": "What?"}, {"role": "assistant", "tool_calls": ["x"], "content": None}]
    with pytest.raises(jinja2.TemplateError):
        processor.apply_chat_template(calls)  # as the template itself does, which adds to a content
