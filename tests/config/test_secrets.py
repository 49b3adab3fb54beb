from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flowtrain.config.data import EvalConfig, SourceConfig
from flowtrain.config.load import load_config, override_config
from flowtrain.config.secrets import redacted, secret_in, without_queries
from flowtrain.errors import ConfigError

SECRET = "hunter2hunter2"
URLS = [
    f"s3://user:{SECRET}@bucket/x.parquet",
    f"s3://:{SECRET}@bucket/x.parquet",
    f"s3://AKID:{SECRET}/with/slashes@bucket/x.parquet",
    f"https://host/x.parquet?X-Amz-Signature={SECRET}",
    f"https://host/x.parquet?a=b&token={SECRET}",
    f"https://host/x.parquet?sv=1&sig={SECRET}",
    f"https://host/x.parquet?AWSAccessKeyId={SECRET}",
    f"https://host/x.parquet?api%5Fkey={SECRET}",
    f"https://host/x.parquet#password={SECRET}",
    f"https://hf_{SECRET * 3}@host/x.parquet",
]


@pytest.mark.parametrize("url", URLS)
def test_a_secret_is_refused_and_never_repeated(minimal: Path, url: str) -> None:
    for key in ("path", "image_root"):
        for override in (f"data.sources.0.{key}={url}", f"data.sources=[{{path: x, {key}: '{url}', wieght: 1}}]"):
            with pytest.raises(ConfigError, match="credentials come from the environment") as caught:
                load_config(minimal, [override])
            assert SECRET not in str(caught.value) and SECRET not in repr(caught.value.faults)
            assert "data.sources" in str(caught.value) and "override" in str(caught.value)
    text = minimal.read_text().replace("path: train.parquet", f"path: {url}")
    minimal.write_text(text)
    with pytest.raises(ConfigError, match=r"line \d+: data.sources.0.path has ") as caught:
        load_config(minimal, ["data.sources.0.path=[", "nonsense"])
    assert SECRET not in str(caught.value)
    for build in (lambda: SourceConfig(path=url), lambda: EvalConfig(path="x", image_root=url)):
        with pytest.raises(ValidationError, match="credentials come from the environment") as refused:
            build()
        assert SECRET not in str(refused.value)


def test_a_secret_in_any_other_key_is_refused_too(minimal: Path) -> None:
    config = load_config(minimal, check_paths=False)
    with pytest.raises(ConfigError, match="name has a password") as caught:
        override_config(config, [f"name=https://me:{SECRET}@host"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "data/x.parquet",
        "s3://bucket/a:b@c/x.parquet",
        "http://localhost:9000/x@y.parquet",
        "hf://datasets/owner/name@main/x.parquet",
        "hf://datasets/owner/tokens/secret=1/x.parquet",
        "https://host/x.parquet?version=3&download=true",
        "s3://bucket/keys/*.tar",
        "a?token=b",
    ],
)
def test_what_is_no_secret(url: str) -> None:
    assert secret_in(url) is None


def test_messages_lose_the_parameters_of_urls() -> None:
    text = f"403 for url 'https://cdn/x?Signature={SECRET}&Key=1' (see https://help)"
    assert without_queries(text) == "403 for url 'https://cdn/x?...' (see https://help)"


def test_what_others_see_of_a_configuration_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    values = {
        "name": "run",
        "data": {
            "sources": [
                {"path": f"s3://user:{SECRET}@bucket/x.parquet"},
                {"path": "https://host/x.parquet?version=3"},
                {"path": "/home/ada/cats/train.parquet"},
                {"path": "/data/train.parquet"},
            ]
        },
        "model": {"hf_token": SECRET, "max_tokens": 5, "image_token": None},
        "observability": {"trackers": ["wandb"], "tracker_options": {"wandb": {"entity": SECRET}}},
    }
    shown = redacted(values)
    assert SECRET not in repr(shown) and values["model"]["hf_token"] == SECRET  # type: ignore[index]
    assert shown == {
        "name": "run",
        "data": {
            "sources": [
                {"path": "(hidden)"},
                {"path": "https://host/x.parquet?..."},
                {"path": "~/cats/train.parquet"},
                {"path": "/data/train.parquet"},
            ]
        },
        "model": {"hf_token": "(hidden)", "max_tokens": 5, "image_token": None},
        "observability": {"trackers": ["wandb"], "tracker_options": "(hidden)"},
    }
