"""``flowtrain init``: writes a starting configuration, and says how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

from flowtrain import api
from flowtrain.cli.plain_text import plain
from flowtrain.config.starting_file import next_commands


def init(model: str, data: str | None, encoder: str | None, output: Path | None, force: bool) -> None:
    """Write as ``api.init`` does, and print what it chose and the next commands."""
    started = api.init(model, data=data, encoder=encoder, output=output, force=force)
    settings, file = started.config.model, str(started.file)
    token = plain(settings.image_token)
    print(f"wrote {started.file}: family {settings.family}, {settings.dtype}, image token {token}")
    for note in started.notes:
        print(plain(note))
    if started.to_fill_in:
        print(f"first set {', '.join(started.to_fill_in)} in it, then")
    print(*next_commands(file, not started.to_fill_in, started.has_rates), sep="\n")
    if not started.has_rates:
        profile = f"flowtrain profile {shlex.quote(file)} --save profile.json"
        print(f"on this machine mode auto needs measured rates: {profile}")
