#!/usr/bin/env bash
# `make demo`: train the quickstart, export it, caption three pictures that it was not trained on.
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
echo "(A few minutes from random weights, the frozen encoder's included: the captions do not fit the pictures yet.)"
