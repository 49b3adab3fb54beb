#!/usr/bin/env bash
# Installs TRL and Axolotl, with what their packing modules import, into a directory that benchmarks/packing.py alone
# looks into (default: build/peers, which git ignores). Nothing of the environment changes: --no-deps, --target.
# Usage: scripts/install_packing_peers.sh [DIRECTORY]; PYTHON names the interpreter, else .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m pip install --quiet --no-deps --upgrade --target "${1:-build/peers}" \
    trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 \
    axolotl==0.19.0 accelerate==1.15.0 psutil==7.2.2
