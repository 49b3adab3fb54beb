from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.commented_yaml import commented_yaml
from flowtrain.config.yaml_text import parse_yaml

KEYS = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda key: key not in ("null", "true", "false"))
# A text of several lines is a template or the like: its lines are not empty and do not begin with a space.
LINES = st.lists(st.from_regex(r"[!-~][ -~]{0,20}", fullmatch=True), min_size=2, max_size=4).map("\n".join)
LINE = st.text(max_size=30)  # control characters too; half surrogates are refused
SCALARS = (
    st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | LINE
    | LINES
    | st.sampled_from(["true", "1e-5", "12:30", "a: b", "- x", "#", "a # b", "<|image_pad|>", "<image>", " a ", "null"])
)
REMARKS = st.sampled_from(["why", "a: b # c", "- d", "two\nlines: 1", "\x85c: 2"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(st.dictionaries(KEYS, inner, min_size=1, max_size=3), min_size=1, max_size=3)
    ),
    max_leaves=12,
)


def paths_in(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        inner = [(str(key), item) for key, item in value.items()]
    else:
        inner = [(str(index), item) for index, item in enumerate(value)] if isinstance(value, list) else []
    found = [path]
    for key, item in inner:
        found += paths_in(item, f"{path}.{key}" if path else key)
    return found


@given(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=5), data=st.data())
def test_it_reads_back_whatever_is_remarked(values: dict[str, Any], data: st.DataObject) -> None:
    paths = st.sampled_from(paths_in(values))
    remarks = data.draw(st.dictionaries(paths, REMARKS))
    hints = data.draw(st.dictionaries(paths, st.just(["key: value # why", "- item"])))
    text = commented_yaml(values, remarks, hints)
    assert parse_yaml(text)[0] == values


def test_it_looks_as_people_write_it() -> None:
    values = {
        "name": "a",
        "seed": 0,
        "model": {"image_token": "<|image_pad|>", "dtype": "bfloat16", "chat_template": "{% a %}\n  b"},
        "data": {
            "sources": [{"path": "/a b", "weight": 0.5}, {"path": "s3://a/*.tar"}],
            "max_seq_len": 4096,
            "segment_nbytes": 16384,
            "learning_rate": 2e-5,
        },
    }
    remarks = {"seed": "decides the order", "model.chat_template": "Ours.", "data.sources.0.path": "yours"}
    hints = {"data.sources.1": ["weight: 1"], "data": ["eval: {path: b}"], "": ["more: true"]}
    assert commented_yaml(values, remarks, hints) == (
        "name: a\n"
        "seed: 0 # decides the order\n"
        "\n"
        "model:\n"
        "  image_token: <|image_pad|>\n"
        "  dtype: bfloat16\n"
        "  # Ours.\n"
        "  chat_template: |-\n"
        "    {% a %}\n"
        "      b\n"
        "\n"
        "data:\n"
        "  sources:\n"
        "    - path: /a b # yours\n"
        "      weight: 0.5\n"
        "    - path: s3://a/*.tar\n"
        "      # weight: 1\n"
        "  max_seq_len: 4096\n  segment_nbytes: 16_384\n  learning_rate: 2e-5\n"
        "  # eval: {path: b}\n"
        "\n"
        "# more: true\n"
    )
