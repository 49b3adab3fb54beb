#!/usr/bin/env bash
# `make demo`: train the quickstart, export it, caption pictures that it was not trained on, and show that they matter.
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
resume=()
if [ -e "$run/config.yaml" ]; then
  echo "$run is there already: going on with it (remove it to start over)."
  resume=(--resume)
fi

.venv/bin/flowtrain train configs/quickstart.yaml "${resume[@]}"
.venv/bin/flowtrain export "$run"
.venv/bin/python scripts/caption.py "$run"
.venv/bin/python scripts/check_vision.py "$run"
