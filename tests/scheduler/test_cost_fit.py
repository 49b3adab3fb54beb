from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.microbatch_costs import FittedCost, MicrobatchCosts
from flowtrain.costs.profile import PROFILE_SCHEMA, Profile, read_profile
from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost_fit import MIN_ROWS, Measured, fit_cost
from flowtrain.scheduler.run_cost import check_device, costs_of, read_microbatch_costs
from flowtrain.types.plan import CostModel

CAPACITY = 2048
TRUE = {
    "longest": CostModel("true", per_token=2e-5, per_longest=3e-8, constant=4e-3),
    "squares": CostModel("true", per_token=2e-5, per_square=3e-8, constant=4e-3),
}


def microbatches(num_rows: int, seed: int) -> list[list[int]]:
    """Lengths in microbatches of all fills and mixtures."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_rows):
        goal, lengths = int(rng.integers(64, CAPACITY)), []
        while (room := goal - sum(lengths)) > 0:
            lengths.append(int(min(room, rng.integers(8, CAPACITY))))
        found.append(lengths)
    return found


def measured(lengths: list[int], seconds: float) -> Measured:
    return Measured(sum(lengths), max(lengths), sum(length**2 for length in lengths), seconds)


def rows_of(cost: CostModel, num_rows: int = 300, noise: float = 0.0, seed: int = 1) -> list[Measured]:
    factors = np.random.default_rng(seed).normal(1.0, noise, num_rows)
    drawn = microbatches(num_rows, seed)
    return [measured(each, cost(each) * factor) for each, factor in zip(drawn, factors.tolist(), strict=True)]


def fitted(rows: list[Measured]) -> FittedCost:
    fit = fit_cost(rows)
    assert fit is not None
    return fit


@pytest.mark.parametrize("form", ["longest", "squares"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_known_coefficients_and_their_form_are_found_again(form: str, noise: float) -> None:
    fit = fitted(rows_of(TRUE[form], noise=noise))
    assert fit.form == form and fit.model.name == "profile"
    for key in ("constant", "per_token", "per_longest", "per_square"):
        assert getattr(fit.model, key) == pytest.approx(getattr(TRUE[form], key), rel=0.1 if noise else 1e-6), key
    assert fit.other_r2 < fit.r2 <= 1.0
    assert fit.r2 > (0.99 if noise else 1 - 1e-12)


@given(
    constant=st.floats(0.0, 0.1),
    per_token=st.floats(1e-7, 1e-3),
    quadratic=st.floats(0.0, 1e-6),
    form=st.sampled_from(["per_longest", "per_square"]),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 1000),
)
def test_no_coefficient_is_negative_and_nothing_beats_the_fit(
    constant: float, per_token: float, quadratic: float, form: str, noise: float, seed: int
) -> None:
    true = CostModel("true", per_token=per_token, constant=constant, **{form: quadratic})
    rows = rows_of(true, 120, noise, seed)
    fit = fit_cost(rows)
    if fit is None:
        return
    model = fit.model
    assert min(model.constant, model.per_token, model.per_longest, model.per_square) >= 0.0
    assert 0.0 <= fit.r2 <= 1.0 and fit.other_r2 <= fit.r2
    assert MIN_ROWS / 2 <= fit.num_rows <= len(rows)
    if noise == 0.0:
        for row in rows:
            assert model.of_sums(row.tokens, row.longest, row.squares) == pytest.approx(row.seconds, rel=1e-6)


def test_what_would_be_negative_is_zero() -> None:
    """A cost cannot fall with longer sub-sequences: only the linear term is kept."""
    drawn = microbatches(200, 3)
    fit = fitted([measured(each, 1.0 + 1e-3 * sum(each) - 1e-8 * max(each) ** 2) for each in drawn])
    assert fit.model.per_longest == fit.model.per_square == 0.0 and fit.model.per_token > 0.0


def test_stalls_do_not_count() -> None:
    rows = rows_of(TRUE["squares"], noise=0.02)
    stalled = [
        Measured(row.tokens, row.longest, row.squares, row.seconds * (1 if index % 20 else 12))
        for index, row in enumerate(rows)
    ]
    fit, clean = fitted(stalled), fitted(rows)
    assert fit.num_rows < len(rows) and fit.r2 > 0.98
    for lengths in microbatches(20, 9):
        assert fit.model(lengths) == pytest.approx(clean.model(lengths), rel=0.03)


def test_what_cannot_tell_a_slope_is_not_fitted() -> None:
    rows = rows_of(TRUE["squares"])
    assert fit_cost([]) is None
    assert fit_cost(rows[: MIN_ROWS - 1]) is None
    assert fit_cost(rows[:MIN_ROWS]) is not None
    alike = [Measured(1000 + k % 40, 900, 900**2, 0.1 + 1e-4 * (k % 40)) for k in range(200)]
    assert fit_cost(alike) is None, "tokens differ by 4 %"
    flat = [Measured(row.tokens, row.longest, row.squares, 0.25) for row in rows]
    assert fit_cost(flat) is None, "no length matters"


# --- the file --------------------------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {"backbone": {"hidden_size": 64, "num_layers": 2}, "freeze": [], "dtype": "float32"}
VERSIONS = {"torch": "2.13.0", "transformers": "5.23"}


@pytest.fixture
def profile() -> Profile:
    costs = MicrobatchCosts(fitted(rows_of(TRUE["squares"], noise=0.02)), MODEL, CAPACITY)
    return Profile("cpu", MODEL, VERSIONS, microbatches=costs)


@pytest.fixture
def file(profile: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    return path


def test_a_fit_survives_its_file(profile: Profile, file: Path) -> None:
    assert json.loads(file.read_text())["schema"] == PROFILE_SCHEMA
    read = read_profile(file)
    assert read == profile and read.source == str(file)
    costs_of(read).check(str(file), MODEL, CAPACITY)
    costs_of(read).check(str(file), MODEL, CAPACITY // 2)
    check_device(read, "cpu", VERSIONS)


def test_a_runs_profile_has_no_times_to_plan_with_and_a_measured_one_no_fit(profile: Profile, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no times of cpu: a run wrote it, .* flowtrain calibrate RUN"):
        read_profile(file).devices(2, 8)
    file.write_text(Profile("cpu", MODEL, VERSIONS).to_json())
    with pytest.raises(ConfigError, match=r"has no fitted cost of microbatches \(scheduler.cost_profile\)"):
        read_microbatch_costs(str(file))


@pytest.mark.parametrize(
    ("model", "capacity", "fault"),
    [
        (MODEL | {"dtype": "bfloat16"}, CAPACITY, "model.dtype is 'float32' there and 'bfloat16' in this run"),
        (MODEL | {"freeze": ["connector"]}, CAPACITY, "model.freeze is [] there and ['connector'] in this run"),
        (
            MODEL | {"backbone": {"hidden_size": 128, "num_layers": 2}},
            CAPACITY,
            "model.backbone.hidden_size is 64 there and 128 in this run",
        ),
        (MODEL, 4096, "capacity is 2048 there and scheduler.microbatch_tokens is 4096 in this run"),
    ],
)
def test_a_profile_of_another_model_is_refused(file: Path, model: dict[str, Any], capacity: int, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_microbatch_costs(str(file)).check(str(file), model, capacity)
    message = str(caught.value)
    assert message.startswith(f"{file}: {fault}") and "measure again" in message


def test_another_device_is_refused_and_other_libraries_are_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = read_profile(file)
    with pytest.raises(ConfigError, match=r"device is 'cpu' there and 'NVIDIA H200' in this run"):
        check_device(profile, "NVIDIA H200", VERSIONS)
    with caplog.at_level(logging.WARNING):
        check_device(profile, "cpu", VERSIONS | {"torch": "2.14.0"})
    assert "torch 2.13.0, now 2.14.0" in caplog.text and "transformers" not in caplog.text


def spoiled(values: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    *parents, last = path
    holder = values
    for key in parents:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("fitted", "r2"), None, "microbatches.fitted.r2: Field required"),
        (("fitted", "model", "per_token"), -1.0, "that are not a valid cost"),
        (("fitted", "model", "per_token"), "much", "microbatches.fitted.model.per_token: "),
        (("fitted", "model"), {"name": "profile", "per_token": 0.0, "constant": 1.0}, "that are not a valid cost"),
        (("capacity",), None, "microbatches.capacity: Field required"),
        (("model",), "qwen", "microbatches.model: "),
    ],
)
def test_a_spoiled_fit_is_refused(file: Path, path: tuple[str, ...], value: Any, fault: str) -> None:
    values = json.loads(file.read_text())
    spoiled(values["microbatches"], *path, value=value)
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        read_microbatch_costs(str(file))
    assert str(file) in str(caught.value) and fault in str(caught.value)
