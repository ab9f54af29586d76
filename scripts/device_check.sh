#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU or a TPU, under 10 minutes: attention kernels checked and
# timed on it, decode of an 8B model with random weights; a JSON report and a Markdown table appear
# under benchmarks/results/. Takes the first Python that has jax (PYTHON=... overrides) and installs
# nothing. Arguments go to scripts/device_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for python in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python; do
  if "$python" -c 'import jax' >/dev/null 2>&1; then
    exec "$python" scripts/device_check.py "$@"
  fi
done
echo "error: no Python with jax found; set PYTHON to one, or run: pip install -e '.[cuda]' (or '.[tpu]')" >&2
exit 2
