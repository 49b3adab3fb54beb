from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.yaml_text import YamlError, dump_yaml, parse_yaml

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(
        ["1e-6", "off", "yes", "null", "~", "12:30", "0x1F", "1_000", "2024-01-01", "<<", ".inf", "", "-"]
    )
)
documents = st.dictionaries(
    st.text(max_size=8),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
    max_size=5,
)


@given(documents)
def test_what_is_dumped_is_read_back(document: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(document))[0] == document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("2E3", 2000.0),
        ("-.5", -0.5),
        (".inf", math.inf),
        ("1_000_000", 1_000_000),
        ("007", 7),
        ("0x10", 16),
        ("off", "off"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(f"key: {text}")[0]["key"]
    assert read == value
    assert type(read) is type(value)


def test_lines_of_values_are_kept() -> None:
    _, lines = parse_yaml("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y\n")
    assert lines[("a",)] == 1
    assert lines[("b", "c")] == 3
    assert lines[("b", "d", 1)] == 6


def test_anchors_and_merges_work() -> None:
    value, _ = parse_yaml("base: &base {x: 1, y: 2}\nother:\n  <<: *base\n  y: 3\n")
    assert value["other"] == {"x": 1, "y": 3}


def bomb(depth: int, row: str) -> str:
    rows = [row.format(name=number, inner=", ".join([f"*a{number - 1}"] * 9)) for number in range(1, depth)]
    return "\n".join(["a0: &a0 {x: 1}", *rows])


@pytest.mark.parametrize("row", ["a{name}: &a{name} [{inner}]", "a{name}: &a{name} {{<<: [{inner}], y{name}: 1}}"])
def test_aliases_and_merges_count_where_they_stand(row: str) -> None:
    assert len(parse_yaml(bomb(4, row))[0]) == 4
    with pytest.raises(YamlError, match="more than 10000 keys and values, aliases and merges counted"):
        parse_yaml(bomb(9, row))


def test_the_first_of_several_merges_counts_and_a_key_of_its_own_more() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\n"
    assert parse_yaml(text)[0]["c"] == {"x": 1, "y": 1, "z": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 2\n  c: 3\n", "line 4: key b.c is given twice; keep one"),
        ("a: 1\n2: 3\n", "line 2: key 2 in the top level must be text"),
        ("a: &a\n  b: *a\n", "line 1: an alias refers to something that contains it"),
        ("a: [1, 2\n", "line 2: not valid YAML: did not find expected ',' or ']'"),
        ("a: !!python/object:os.system x\n", "line 1: not valid YAML: could not determine a constructor"),
        ("a: \x00", "not valid YAML: unacceptable character"),
        ("a: !!int abc\n", "line 1: 'abc' cannot be read as int; write a plain value, without !!int"),
        ("a: !!float abc\n", "line 1: 'abc' cannot be read as float"),
        ("a: !!bool abc\n", "line 1: 'abc' cannot be read as bool"),
        ("a: !!timestamp 2020-99-99\n", "line 1: !!timestamp is no type of a configuration; leave it out"),
        ("a: " + "9" * 5000, "line 1: '9999"),
        ('a: "\\ud800"', "line 1: not valid YAML: found invalid Unicode character escape code"),
        ("a: 1\nb: \ud800", "line 2: there is half of a surrogate pair; take that out"),
        ("? [a, b]\n: 1\n", "line 1: key a list or mapping in the top level must be text"),
        ("a: &a {<<: *a}\n", "line 1: an alias refers to something that contains it"),
        ("<<: 1\n", "line 1: << in the top level must be given a mapping, or a list of mappings"),
        ("a: " + "[" * 500 + "]" * 500, "line 1: more than 50 mappings and lists inside each other; write it flatter"),
        ("".join(f"k{n}: {n}\n" for n in range(11_000)), "line 5000: more than 10000 keys and values"),
        ("x" * (1 << 21), "2097152 characters, more than a configuration has (262144)"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert str(caught.value).startswith(message)
