#!/usr/bin/env bash
# From a fresh clone to a trained (tiny) model: set up, make the starting model, train. A second call skips what is done and
# trains again, over the first run's directory (runs/quickstart).
#
#   bash scripts/quickstart.sh [options of `laminar train`, for example --set trainer.steps=5]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/python scripts/make_tiny_model.py --output models/tiny
echo "+ laminar train configs/quickstart.yaml --overwrite $*"
exec .venv/bin/laminar train configs/quickstart.yaml --overwrite "$@"
