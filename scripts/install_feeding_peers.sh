#!/usr/bin/env bash
# Makes an environment of its own for the loaders that benchmarks/feeding.py compares with (default: build/feeding_peers,
# which git ignores; pass its bin/python with --peers-python). torch is that of constraints.txt. MosaicML streaming comes
# without its dependencies: it asks for older numpy and transformers than the others take, and for torchvision, which
# only its ready-made collections need.
# Usage: scripts/install_feeding_peers.sh [DIRECTORY]; PYTHON names the interpreter that makes it, else python3.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:-build/feeding_peers}"
"${PYTHON:-python3}" -m venv "$directory"
pip() { "$directory/bin/python" -m pip install --quiet "$@"; }
pip "$(grep '^torch==' constraints.txt)" numpy==2.1.3 datasets==5.2.0 webdataset==1.0.2 megatron-energon==7.4.1 \
    transformers==5.23.0 brotli==1.2.1 zstd==1.5.7.2 python-snappy catalogue==2.0.10 boto3
pip --no-deps mosaicml-streaming==0.13.0
