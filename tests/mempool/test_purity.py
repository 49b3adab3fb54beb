from __future__ import annotations

import subprocess
import sys

import pytest

PURE = ["gva", "page_table", "arena", "free_runs", "watermarks", "host"]


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_neither_torch_nor_ray_nor_numpy(module: str) -> None:
    code = (
        f"import sys, flowtrain.mempool.{module}\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'numba', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
