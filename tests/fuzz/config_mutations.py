"""Random damage to configurations: to the values of a valid one, and to its text."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
}
CLIP: dict[str, Any] = {**SIGLIP, "model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = {**QWEN3, "model_type": "llama"}


def valid(rng: random.Random, data: str, tokenizer: str) -> dict[str, Any]:
    """A configuration that can start, as plain values."""
    return {
        "name": "fuzzed",
        "runs_dir": "runs",
        "seed": 1,
        "mode": rng.choice(["decoupled", "colocated", "disaggregated", "monolithic", "llm_only"]),
        "model": {"family": rng.choice(["llava", "variable_llava"]), "tokenizer": tokenizer, "device": "cpu"},
        "encoders": {
            "vision": {
                "config": dict(rng.choice([SIGLIP, CLIP])),
                "image_processor": {"size": {"height": 28, "width": 28}},
                "num_cpus": 0.5,
                "segment_nbytes": 1 << 24,
            }
        },
        "backbone": {"config": dict(rng.choice([QWEN3, LLAMA])), "data_parallel_size": 1, "num_cpus": 0.5},
        "data": {
            "sources": [{"path": data, "name": "first", "weight": 0.5}, {"path": data, "name": "second"}],
            "max_seq_len": 64,
            "eval": {"path": data, "every_steps": 2, "max_samples": 2},
        },
        "training": {"global_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3, "betas": [0.9, 0.95]},
        "scheduler": {"microbatch_tokens": 64, "lookahead_steps": 2},
        "pool": {"feeder_segment_nbytes": 1 << 28},
        "checkpoint": {"every_steps": 2, "keep": 1},
        "limits": {"stall_timeout_s": 100.0, "stop_timeout_s": 10, "max_encoder_restarts": 1},
        "observability": {"progress": "plain", "trackers": [], "tracker_options": {}},
    }


ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 1.5, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"),
    2**31, 2**53,
    2**63, 10**30, -(10**30), 10**6, 10**9, "", " ", "abc", "1", "1e9", "auto", "null", "~", "~nosuchuser/x",
    "~nosuchuser", "/", "/nonexistent/x", "..", "/dev/null", "/dev/zero", "/proc/self/mem", "x" * 300, "x" * 70_000,
    "a/b", "a" * 200 + "/b", "[", "**", "*", "http://[", "file://", "://", "s3:/x", "a\nb", "\t", "猫", "\u202e",
    "\x7f",
    "%s %d {0}", "{{ 1 / 0 }}", "{% for %}", "!!int abc", "a.b", "nul", "-", "--resume", [], {}, [None], [[]], [1, "a"],
    {"a": None}, {"": {}}, {"a": {"b": {"c": 1}}}, [0] * 50, ["x"] * 200, [1.0, float("nan")], {"type": "x"},
)  # fmt: skip
HF_KEYS = (
    "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "sliding_window",
    "attention_bias", "attention_dropout", "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "dtype", "torch_dtype", "num_channels", "image_size",
    "patch_size", "layer_norm_eps", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "num_key_value_heads", "model_type", "architectures", "id2label", "label2id", "num_labels",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type",
    "max_window_layers",
    "use_sliding_window", "_attn_implementation", "attn_implementation", "quantization_config", "auto_map",
    "name_or_path",
    "transformers_version", "vision_use_head", "projection_dim", "attention_multiplier", "mlp_bias", "pretraining_tp",
    "base_model_tp_plan", "base_model_pp_plan", "sub_configs", "attribute_map", "keys_to_ignore_at_inference",
    "to_dict",
    "__class__", "self", "kwargs",
)  # fmt: skip
PROCESSOR_KEYS = (
    "size", "crop_size", "do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "resample",
    "rescale_factor", "image_mean", "image_std", "image_processor_type", "do_pad", "pad_size", "data_format",
    "return_tensors",
)  # fmt: skip


@dataclass
class Case:
    """A damaged configuration: the file's bytes and overrides; ``changes`` names what was done."""

    values: dict[str, Any]
    overrides: list[str]
    changes: list[str]
    text: bytes = b""


def cases(seed: int, count: int, data: str, tokenizer: str) -> Iterator[Case]:
    """Yield ``count`` damaged configurations, the same ones for the same seed; each mutation comes in its turn."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        case = Case(valid(rng, data, tokenizer), [], [])
        mutation = MUTATIONS[number % len(MUTATIONS)]
        for each in (mutation, *rng.choices(VALUE_MUTATIONS, k=rng.choice([0, 0, 0, 1, 2]))):
            each(rng, case)
            case.changes.append(each.__name__)
        # In JSON's style every value survives, and a mapping may hold the same list twice.
        case.text = yaml.safe_dump(case.values, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
        text_mutation = TEXT_MUTATIONS[number // 5 % len(TEXT_MUTATIONS)] if number % 5 == 0 else None
        if text_mutation is not None:
            case.text = text_mutation(rng, case.text)
            case.changes.append(text_mutation.__name__)
        yield case


# --- values ---------------------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def _holder(case: Case, path: tuple[Any, ...]) -> Any:
    holder: Any = case.values
    for key in path[:-1]:
        holder = holder[key]
    return holder


def _any_place(rng: random.Random, case: Case, within: str | None = None) -> tuple[Any, ...]:
    places = [path for path in _places(case.values) if within is None or within in path[:-1]]
    return rng.choice(places or list(_places(case.values)) or [("name",)])


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD_VALUES))


def value_odd(rng: random.Random, case: Case) -> None:
    path = _any_place(rng, case)
    _holder(case, path)[path[-1]] = _odd(rng)
    case.changes.append(f"{path}")


def value_lost(rng: random.Random, case: Case) -> None:
    path = _any_place(rng, case)
    del _holder(case, path)[path[-1]]


def value_wrapped(rng: random.Random, case: Case) -> None:
    path = _any_place(rng, case)
    holder = _holder(case, path)
    holder[path[-1]] = rng.choice([[holder[path[-1]]], {"a": holder[path[-1]]}, str(holder[path[-1]])])


def values_swapped(rng: random.Random, case: Case) -> None:
    one, other = _any_place(rng, case), _any_place(rng, case)
    if one[: len(other)] != other and other[: len(one)] != one:
        a, b = _holder(case, one), _holder(case, other)
        a[one[-1]], b[other[-1]] = b[other[-1]], a[one[-1]]


def number_scaled(rng: random.Random, case: Case) -> None:
    numbers = [path for path in _places(case.values) if type(_holder(case, path)[path[-1]]) in (int, float)]
    if numbers:
        path = rng.choice(numbers)
        _holder(case, path)[path[-1]] *= rng.choice([-1, 0, 1000, 10**6, 10**12, 10**30, 1e-9, 0.5])
        case.changes.append(f"{path}")


def key_misspelt(rng: random.Random, case: Case) -> None:
    path = _any_place(rng, case)
    holder = _holder(case, path)
    if isinstance(holder, dict):
        name = str(path[-1])
        at = rng.randrange(len(name) + 1)
        holder[name[:at] + rng.choice(["", "x", "_", " ", ".", "é"]) + name[at + 1 :]] = holder.pop(path[-1])


def key_odd(rng: random.Random, case: Case) -> None:
    path = _any_place(rng, case)
    holder = _holder(case, path)
    if isinstance(holder, dict):
        holder[rng.choice(["", "x" * 2000, "a.b", "__class__", "猫", "self", "model_config", "*", "\x7f"])] = _odd(rng)


def module_setting_odd(rng: random.Random, case: Case) -> None:
    """An odd value in a section that goes to a class of Hugging Face."""
    encoders, backbone = case.values.get("encoders"), case.values.get("backbone")
    vision = encoders.get("vision") if isinstance(encoders, dict) else None
    choices = [(vision, "config", HF_KEYS), (backbone, "config", HF_KEYS), (vision, "image_processor", PROCESSOR_KEYS)]
    holder, section, keys = rng.choice(choices)
    if isinstance(holder, dict) and isinstance(holder.get(section), dict):
        key = rng.choice([*keys, *holder[section]])
        holder[section][key] = _odd(rng)
        case.changes.append(f"{section}.{key}")


def section_odd(rng: random.Random, case: Case) -> None:
    case.values[rng.choice([*case.values, "emulated", "pipeline", "allocator", "connector"])] = _odd(rng)


def limit_odd(rng: random.Random, case: Case) -> None:
    key = rng.choice(
        ["placement_timeout_s", "start_timeout_s", "stall_warning_s", "stall_timeout_s", "lease_timeout_s",
         "collective_timeout_s", "stop_timeout_s", "max_encoder_restarts", "coordinator_timeout_s"]
    )  # fmt: skip
    case.values.setdefault("limits", {})
    if isinstance(case.values["limits"], dict):
        case.values["limits"][key] = _odd(rng)


def override_odd(rng: random.Random, case: Case) -> None:
    path = ".".join(str(key) for key in _any_place(rng, case))
    value = rng.choice(["", "[", "{", "a: b: c", "&a [*a]", "!!int abc", "!!set {a}", "~nosuchuser/x", "1e400", "-5",
                        ".nan", "{a: {b: 1}}", "[1, 2", "'", "0x", "9" * 5000, "{" * 600, "!!binary x",
                        "=="])  # fmt: skip
    shape = rng.choice(["{path}={value}", "{path}={value}", "{path}.a.b={value}", "={value}", "{path}",
                        ".{path}={value}",
                        "a." * 400 + "{path}={value}", "{path}.0={value}"])  # fmt: skip
    case.overrides.append(shape.replace("{path}", path).replace("{value}", value))


VALUE_MUTATIONS: tuple[Callable[[random.Random, Case], None], ...] = (
    value_odd, value_odd, value_lost, value_wrapped, values_swapped, number_scaled, key_misspelt, key_odd,
    module_setting_odd, module_setting_odd, module_setting_odd, section_odd, limit_odd, override_odd,
)  # fmt: skip
MUTATIONS = VALUE_MUTATIONS


# --- text -----------------------------------------------------------------------------------------------------------


def bytes_flipped(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice([1, 3, 20])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def signs_inserted(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    signs = rng.choice([b":", b"- ", b"\t", b"{", b"[", b"&a", b"*a", b"!!int ", b"!!timestamp ", b"!!bool ",
                        b"? ", b"|\n",
                        b"%YAML 9.9\n", b"---\n", b"...\n", b"<<: ", b"\xff", b"\r", b"\x00", b"\xef\xbb\xbf",
                        b'"\\ud800"',
                        b"!!python/name:os.system ", b"!<x> ", b"@", b"`", b"!!float x", b"!!null {}"])  # fmt: skip
    return text[:at] + signs + text[at:]


def text_cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def lines_moved(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines.insert(to, rng.choice([lines.pop(at), lines[at - 1], b"  " + lines[at - 1], lines[at - 1].lstrip()]))
    return b"".join(lines)


def aliases_without_end(rng: random.Random, text: bytes) -> bytes:
    depth, width = rng.choice([(9, 9), (25, 2), (200, 2), (3, 40)])
    rows = ["a0: &a0 {x: 1}"]
    for number in range(1, depth):
        inner = ", ".join([f"*a{number - 1}"] * width)
        rows.append(f"a{number}: &a{number} " + rng.choice([f"[{inner}]", f"{{<<: [{inner}], y{number}: 1}}"]))
    return text + "\n".join(rows).encode() + b"\n"


def keys_without_end(rng: random.Random, text: bytes) -> bytes:
    return text + b"".join(b"k%d: %d\n" % (number, number) for number in range(rng.choice([10_000, 30_000, 300_000])))


def nested_without_end(rng: random.Random, text: bytes) -> bytes:
    depth = rng.choice([60, 500, 20_000])
    one, other = rng.choice([(b"[", b"]"), (b"{a: ", b"}"), (b"- ", b""), (b"? ", b"")])
    return text + b"deep: " + (b"\n  " if one in (b"- ", b"? ") else b"") + one * depth + b"1" + other * depth + b"\n"


def another_text(rng: random.Random, text: bytes) -> bytes:
    return rng.choice([b"", b"\n", b"- 1\n", b"abc", b"null", b"1", b"\xff\xfe\x00", b"PAR1", b"{}", b"[]",
                        b"name: x\n",
                       b"*a", b"&a *a", b"&a [*a]", b"a: &a {<<: *a}", b"<<: 1", b"? [a]\n: 1", b"? {a: b}\n: 1",
                       bytes(rng.randrange(256) for _ in range(200)), b"{" * 100_000, b"a: " * 1000, b"'" * 999,
                       b" " * 500_000, b"#" * 500_000, b"- " * 5000, b"x" * 2_000_000])  # fmt: skip


TEXT_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    bytes_flipped, signs_inserted, text_cut, lines_moved, aliases_without_end, keys_without_end, nested_without_end,
    another_text, signs_inserted,
)  # fmt: skip
