"""What the table of modes says of a plan."""

from __future__ import annotations

import pytest

from flowtrain.cli.mode_tables import settings_text
from flowtrain.types.run_plan import BackboneSettings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (BackboneSettings(8192, "full", 1, "hybrid"), "8,192 tokens, checkpointing full, sharding hybrid"),
        (BackboneSettings(512, None, 4, None), "512 tokens, 4 chunks"),
    ],
)
def test_settings_are_named_by_their_keys(settings: BackboneSettings, text: str) -> None:
    assert settings_text(settings) == text
