from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.load import dump_resolved, load_config, override_config
from flowtrain.config.module_values import MOST, SIDES
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FaultCode

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_values_overrides_and_defaults_are_joined(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "training.learning_rate=3e-4",
            "training.betas=[0.8, 0.9]",
            "training.learning_rates.connector=1e-3",
            "backbone.config.hidden_size=64",
            "data.sources.0.weight=2",
            "data.sources.1.path=train.parquet",
            "observability.progress=off",
            "encoders.vision.num_cpus=0.5",
        ],
    )
    assert config.training.max_steps == 4
    assert config.training.learning_rate == 3e-4
    assert config.training.betas == (0.8, 0.9)
    assert config.training.learning_rates.connector == 1e-3
    assert config.backbone.config == {"model_type": "qwen3", "rms_norm_eps": 1e-6, "hidden_size": 64}
    assert [source.weight for source in config.data.sources] == [2.0, 1.0]
    assert config.observability.progress == "off"
    assert config.encoders["vision"].num_cpus == 0.5
    assert config.training.global_batch_size == 8


def test_the_last_override_of_a_key_holds(minimal: Path) -> None:
    assert load_config(minimal, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed': must look like section.key=value, e.g. training.max_steps=20"),
        ("data..x=1", "override 'data..x=1': must look like section.key=value, e.g. training.max_steps=20"),
        ("seed.x=1", "override 'seed.x=1': seed is 3, not a section; it has no key 'x'"),
        (
            "data.sources.2.path=a",
            "override 'data.sources.2.path=a': data.sources is a list of 1; "
            "'2' must be an index from 0 to 1 (the last appends)",
        ),
        (
            "data.system_prompt=a: b: c",
            "override 'data.system_prompt=a: b: c': the value of data.system_prompt cannot be read "
            "(line 1: not valid YAML: mapping values are not allowed in this context); quote text with YAML's special "
            "signs",
        ),
    ],
)
def test_an_override_that_cannot_be_applied(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["seed=3", override])
    assert str(caught.value) == message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: the configuration cannot be read: No such file or directory"):
        load_config(tmp_path / "none.yaml")
    for text, problem in (
        ("- a\n", "must be a mapping of keys, not list"),
        ("", "must be a mapping of keys, not NoneType"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path, check_paths=False)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_resolved(config))
    assert load_config(resolved, check_paths=False) == config


def test_the_quickstart_finds_its_data_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml")
    assert config.data.sources[0].path == str(REPOSITORY / "assets/openclipart/train.parquet")
    assert config.model.tokenizer == str(REPOSITORY / "assets/tokenizer")


def test_the_realistic_example_names_hub_models_and_the_users_data() -> None:
    path = REPOSITORY / "configs" / "siglip_qwen3.yaml"
    config = load_config(path, check_paths=False)
    assert config.encoders["vision"].path == "google/siglip-so400m-patch14-384"
    assert config.backbone.path == "Qwen/Qwen3-1.7B"
    with pytest.raises(
        ConfigError, match=r"data\.sources\.0\.path = '/data/finevision/train': no such file or directory"
    ):
        load_config(path)


@given(
    seed=st.integers(0, 2**63),
    learning_rate=st.floats(0, 1),
    prompt=st.none() | st.text(max_size=20),
    # Sizes that a check of its own knows (depth, size) are refused unless they are possible.
    hf_config=st.dictionaries(
        st.text(max_size=6).filter(lambda name: name not in {*MOST, *SIDES}),
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    ),
)
def test_dump_and_load_round_trip(
    seed: int,
    learning_rate: float,
    prompt: str | None,
    hf_config: dict[str, object],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    values = load_config(REPOSITORY / "configs" / "quickstart.yaml").model_dump()
    values["seed"] = seed
    values["training"]["learning_rate"] = learning_rate
    values["data"]["system_prompt"] = prompt
    values["backbone"]["config"] = hf_config
    config = RunConfig.model_validate(values)
    path = tmp_path_factory.mktemp("round_trip") / "config.yaml"
    path.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(path) == config


def test_overrides_of_a_loaded_config(minimal: Path) -> None:
    config = load_config(minimal)
    assert override_config(config, []) == config
    assert override_config(config, ["training.max_steps=9"]).training.max_steps == 9


def test_a_refusal_carries_each_fault_with_its_key_and_kind(minimal: Path) -> None:
    def faults(*overrides: str) -> list[tuple[str, FaultCode]]:
        with pytest.raises(ConfigError) as caught:
            load_config(minimal, overrides)
        assert all(fault.text in str(caught.value) for fault in caught.value.faults)
        return [(fault.key, fault.code) for fault in caught.value.faults]

    assert faults("sed=1", "seed=-1", "data.sources.0.weight=x") == [
        ("seed", FaultCode.VALUE),
        ("data.sources.0.weight", FaultCode.VALUE),
        ("sed", FaultCode.KEY),
    ]
    assert faults("training.num_epochs=1") == [("training.max_steps", FaultCode.CONFLICT)]
    assert faults("backbone.data_parallel_size=4096") == [("backbone.data_parallel_size", FaultCode.DEGREES)]
    assert faults("data.sources.0.path=none") == [("data.sources.0.path", FaultCode.VALUE)]
    assert faults("pool.feeder_segment_nbytes=2097152", "pool.max_segment_nbytes=1048576")[0][1] is FaultCode.POOL
    assert faults("no override") == [] and faults("seed=[") == [], "what cannot be read has no key"
