"""How hard hypothesis tries: ``ci`` by default, ``nightly`` by ``HYPOTHESIS_PROFILE`` or ``--hypothesis-profile``.

No deadlines, and slow generation is no fault of a test: machines also do something else. ``ci`` tries the same examples
every time; ``nightly`` looks for new ones.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", COMMON, max_examples=100, derandomize=True)
settings.register_profile("nightly", COMMON, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HEAVY = ("e2e", "processes", "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files whose tests start processes first: they take minutes, and pure tests fill the gap at the end."""
    heavy = {item.path for item in items if any(item.get_closest_marker(mark) for mark in HEAVY)}
    items.sort(key=lambda item: item.path not in heavy)  # stable: a file's tests stay together
