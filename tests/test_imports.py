"""The pure rooms are fast to import and need neither torch nor Ray: looked at in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import flowtrain

REPOSITORY = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "transformers")
PURE_PACKAGES = ("types", "flow", "config", "costs", "allocator", "scheduler", "simulator", "search", "observability")
PURE_MODULES = (
    "errors",
    "api",
    "cli.app",
    "pipeline.actions",
    "pipeline.dataflow",
    "pipeline.grid",
    "pipeline.progress",
    "pipeline.schedules",
    "pipeline.transfers",
    "pipeline.validate",
    "pipeline.partition",
    "pipeline.recompute",
    "mempool.gva",
    "mempool.page_table",
    "mempool.arena",
)
NOT_PURE = ("flowtrain.observability.ray_sink",)


def pure_modules() -> list[str]:
    every = [module.name for module in pkgutil.walk_packages(flowtrain.__path__, "flowtrain.", onerror=lambda _: None)]
    roots = [f"flowtrain.{name}" for name in PURE_PACKAGES + PURE_MODULES]
    inside = [name for name in every if any(name == root or name.startswith(f"{root}.") for root in roots)]
    return [name for name in inside if name not in NOT_PURE]


def imported_by(statement: str) -> list[str]:
    """Heavy packages that are in ``sys.modules`` after a statement in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_pure_rooms_import_neither_torch_nor_ray() -> None:
    modules = pure_modules()
    assert {"flowtrain.types.plan", "flowtrain.config.load", "flowtrain.scheduler", "flowtrain.flow.flow"} <= set(
        modules
    )
    assert imported_by("\n".join(f"import {name}" for name in modules)) == []


def test_importing_flowtrain_is_light_and_offers_what_the_commands_do() -> None:
    assert imported_by("import flowtrain; [getattr(flowtrain, name) for name in dir(flowtrain)]") == []
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        flowtrain.trian  # noqa: B018


def test_dir_shows_what_flowtrain_offers() -> None:
    assert {"doctor", "dry_run", "export", "pack", "plan", "profile", "train", "__version__"} <= set(dir(flowtrain))


def test_the_check_itself_sees_what_is_imported() -> None:
    assert imported_by("import flowtrain.models.loss") != []
