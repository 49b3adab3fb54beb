"""``flowtrain init``: writes a starting configuration, and says how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

from flowtrain import api
from flowtrain.cli.plain_text import plain


def init(model: str, data: str | None, encoder: str | None, output: Path | None, force: bool) -> None:
    """Write as ``api.init`` does, and print the next commands."""
    started = api.init(model, data=data, encoder=encoder, output=output, force=force)
    settings, file = started.config.model, shlex.quote(str(started.file))
    token = plain(settings.image_token)
    print(f"wrote {started.file}: family {settings.family}, {settings.dtype}, image token {token}")
    if started.to_fill_in:
        print(f"first set {', '.join(started.to_fill_in)} in it, then")
    print(f"flowtrain plan {file} --devices 8")
    if started.has_rates:
        print(f"flowtrain train {file} --dry-run")
        return
    # Where nothing has rates, mode auto has no plan to show.
    print(f"flowtrain train {file} mode=decoupled --dry-run")
    print(f"on this machine mode auto needs measured rates: flowtrain profile {file} --save profile.json")
