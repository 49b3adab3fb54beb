"""Keys that name parameters: what they stand for, and what is refused before the model is known and after."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.load import dump_resolved, load_config, load_resolved
from flowtrain.config.parameter_checks import names_parameters, parameter_faults
from flowtrain.config.parameter_names import ParameterNames, module_of
from flowtrain.config.resume import check_resumable
from flowtrain.config.training import LearningRateConfig
from flowtrain.errors import ConfigError, FaultCode

EMBEDDING, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
NAMES = (
    *(f"connector.linear_{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")),
    EMBEDDING,
    *(
        f"language_model.model.layers.{layer}.{part}.weight"
        for layer in range(12)
        for part in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    ),
    "language_model.model.norm.weight",
    HEAD,
)
TIED = ParameterNames.of(NAMES, {HEAD: EMBEDDING})
UNTIED = ParameterNames.of(NAMES, {})

PATTERNS = st.lists(
    st.sampled_from(
        ["*", "?", "[0-9]", "[01]", "[!0]", ".", "layers", "mlp", "weight", "connector", "1", "lm_head", "model"]
    ),
    min_size=1,
    max_size=6,
).map("".join) | st.sampled_from(NAMES)


@given(PATTERNS.filter(lambda text: set("*?[.") & set(text)))
def test_a_pattern_stands_for_what_its_names_match(pattern: str) -> None:
    alone = {name for name in NAMES if fnmatchcase(name, pattern)}
    assert UNTIED.named_by(pattern) == alone
    assert TIED.named_by(pattern) == {EMBEDDING if name == HEAD else name for name in alone}


@given(st.lists(PATTERNS | st.sampled_from(["connector", "backbone"]), max_size=4))
def test_what_is_frozen_is_what_any_entry_stands_for(freeze: list[str]) -> None:
    keys = [key for key in freeze if set("*?[.") & set(key) or key in ("connector", "backbone")]
    frozen = TIED.frozen(keys)
    assert frozen == {name for name in TIED.of_each if any(name in TIED.named_by(key) for key in keys)}
    assert TIED.frozen(reversed(keys)) == frozen == TIED.frozen([*keys, *keys])


def test_modules_share_out_all_parameters() -> None:
    connector, backbone = map(TIED.named_by, ("connector", "backbone"))
    assert connector | backbone == TIED.of_each.keys() and not connector & backbone
    assert {module_of(name) for name in connector} == {"connector"}
    assert HEAD not in TIED.of_each and HEAD in UNTIED.of_each


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("language_model.model.layers.1", "did you mean 'language_model.model.layers.1.*', which names 3?"),
        ("model.layers.3.*", "did you mean '*model.layers.3.*', which names 3?"),
        ("model.language_model.embed_tokens.weight", "did you mean '*embed_tokens.weight', which names 1?"),
        ("model.multi_modal_projector.linear_1.*", "did you mean '*linear_1.*', which names "),
        ("language_model.model.layer.3.*", "the nearest are language_model.model.layers.3."),
        ("a.*[a-z]*", "the nearest are "),
        ("model.visual.linear_1.weight", "did you mean '*linear_1.weight', which names 1?"),
        ("vision_tower.encoder.layers.3.self_attn.q_proj.weight", "parameters of encoders have no names here"),
        ("*visual*", "parameters of encoders have no names here"),
    ],
)
def test_a_pattern_without_a_match_gets_a_hint(pattern: str, hint: str) -> None:
    assert not TIED.named_by(pattern)
    assert TIED.hint(pattern).startswith(hint)


# --- the configuration alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        (
            "model.freeze=[conector]",
            "model.freeze.0",
            "model.freeze.0 = 'conector': must be 'connector' or 'backbone'; did",
        ),
        ("model.freeze=[vision]", "model.freeze.0", "or a pattern of parameter names, with a * or a dot"),
        (
            "model.freeze=[connector, encoders]",
            "model.freeze.1",
            "encoders are frozen unless encoders.<name>.trainable",
        ),
        ("model.freeze=connector", "model.freeze", "must be a list"),
        (
            "training.learning_rates.conector=1e-4",
            "training.learning_rates.conector",
            "no module (connector, backbone, encoders) has this name; did you mean 'connector'?",
        ),
        (
            "training.learning_rates={'*norm*': -1}",
            "training.learning_rates.*norm*",
            "must be at least 0",
        ),
        ("training.learning_rates={'*norm*': fast}", "training.learning_rates.*norm*", "must be a number"),
    ],
)
def test_what_cannot_be_a_key_is_refused_at_once(minimal: Path, override: str, key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [override])
    (fault,) = caught.value.faults
    assert fault.key == key and text in fault.text


def test_patterns_survive_being_written_and_decide_a_resume(minimal: Path, tmp_path: Path) -> None:
    overrides = [
        'model.freeze=[connector, "language_model.model.layers.[0-9].*"]',
        'training.learning_rates={"*norm*": 1e-3, backbone: 1e-5}',
    ]
    config = load_config(minimal, overrides)
    assert config.frozen_modules == ("connector", "encoders")
    assert config.training.learning_rates.given == {"*norm*": 1e-3, "backbone": 1e-5}
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    for other in ("model.freeze=[connector]", 'training.learning_rates={"*norm*": 1e-4, backbone: 1e-5}'):
        with pytest.raises(ConfigError, match=other.partition("=")[0]):
            check_resumable(config, load_config(minimal, [*overrides, other]))
    check_resumable(config, load_config(minimal, overrides))


# --- against the names of the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "code", "texts"),
    [
        (
            ['model.freeze=["*layer.0*", "*norm*"]', 'training.learning_rates={"*head*": 1e-4, "lm.*": 1e-4}'],
            FaultCode.VALUE,
            ["model.freeze: '*layer.0*' matches no", "training.learning_rates: 'lm.*' matches no"],
        ),
        (
            ["model.freeze=[connector]", "training.learning_rates.connector=1e-3"],
            FaultCode.CONFLICT,
            ["'connector' (0.001) has no effect: model.freeze (connector) freezes all that it stands for"],
        ),
        (
            ['model.freeze=["*lm_head*"]', 'training.learning_rates={"*embed_tokens*": 1e-3}'],
            FaultCode.CONFLICT,
            ["'*embed_tokens*' (0.001) has no effect: model.freeze (*lm_head*)"],
        ),
        (
            ['training.learning_rates={"*norm*": 1e-3, "*layers.1.*": 1e-4, "*layers.2.*": 1e-3}'],
            FaultCode.CONFLICT,
            ["'*norm*' (0.001) and '*layers.1.*' (0.0001) both name language_model.model.layers.1.input_layernorm"],
        ),
        (
            ['training.learning_rates={"*lm_head*": 1e-3, "*embed_tokens*": 1e-4}'],
            FaultCode.CONFLICT,
            ["both name language_model.model.embed_tokens.weight; give them one rate"],
        ),
        (
            ['model.freeze=[connector, "language_model.*"]'],
            FaultCode.CONFLICT,
            ["leaves nothing to train; take a pattern"],
        ),
        (
            ["mode=llm_only", 'model.freeze=["language_model.*"]'],
            FaultCode.CONFLICT,
            ["leaves nothing to train"],
        ),
        (["mode=monolithic", 'model.freeze=["*"]'], FaultCode.CONFLICT, ["or train an encoder with"]),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    minimal: Path, overrides: list[str], code: FaultCode, texts: list[str]
) -> None:
    config = load_config(minimal, overrides)
    faults = parameter_faults(config, TIED)
    assert names_parameters(config) and {fault.code for fault in faults} == {code}
    assert len(faults) == len(texts)
    for fault, text in zip(faults, texts, strict=True):
        assert text in fault.text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ['model.freeze=["*embed_tokens*"]', "training.learning_rates.backbone=1e-5"],
        ['training.learning_rates={"*norm*": 1e-3, "*layers.1.*": 1e-3, backbone: 1e-5}'],
        ['model.freeze=["*norm*"]', 'training.learning_rates={"*layers.1.*": 1e-3, "*": 1e-3}'],
        ['model.freeze=["*"]', "mode=monolithic", "encoders.vision.trainable=true"],
    ],
)
def test_what_fits_is_let_through(minimal: Path, overrides: list[str]) -> None:
    assert parameter_faults(load_config(minimal, overrides), TIED) == []


RATE_KEYS = st.dictionaries(
    st.sampled_from(["*norm*", "*layers.1.*", "*layers.*", "*mlp*", "connector", "backbone"]),
    st.sampled_from([1e-3, 1e-4]),
)


@given(RATE_KEYS, st.sampled_from(sorted(TIED.of_each)))
def test_a_rate_does_not_depend_on_the_order_of_keys(rates: dict[str, float], name: str) -> None:
    def rate_of(given: dict[str, float]) -> float | str | None:
        try:
            return LearningRateConfig.model_validate(given).rate_of(TIED.of_each[name])
        except ConfigError:
            return "refused"

    matching = {rate for key, rate in rates.items() if "*" in key and fnmatchcase(name, key)}
    expected: float | str | None = rates.get(module_of(name))
    if matching:
        expected = "refused" if len(matching) > 1 else matching.pop()
    assert rate_of(rates) == rate_of(dict(reversed(rates.items()))) == expected
