#!/usr/bin/env bash
# Runs the tests in .venv (made if absent). --all adds, in .venv-parity with Python 3.11, the core of
# the suite on jax 0.10 and live parity with transformers, and, in .venv-aot, programs compiled for
# TPUs and GPUs that are not here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/find_python.sh

all=false
case "${1:-}" in
  "") ;;
  --all) all=true ;;
  *) echo "usage: scripts/test.sh [--all]" >&2; exit 2 ;;
esac
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# A worker that runs out of tests takes half of another's, the last ones.
parallel=(--numprocesses auto --dist worksteal)

python="$(find_python)"
make_venv .venv "$python" "[test]"
echo "==> ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "==> tests on $(.venv/bin/python -c 'import sys, jax; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}")')"
.venv/bin/python -m pytest "${parallel[@]}" --ignore tests/parity --ignore tests/aot

if $all; then
  make_venv .venv-parity "$(find_python 3.11)" "[parity]"
  describe='import sys, jax, torch, transformers as t; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, torch {torch.__version__}, transformers {t.__version__}")'
  echo "==> core tests and live parity on $(.venv-parity/bin/python -c "$describe")"
  # Where jax's versions can differ. Real models, memory and what is slow ran on the newest one above;
  # live parity asks of each family what the stored results do.
  .venv-parity/bin/python -m pytest "${parallel[@]}" -k "not named_case and not broken_kernels" \
    --ignore tests/models/test_real_models.py --ignore tests/models/test_family_parity.py \
    --ignore tests/models/checkpoint/test_load_memory.py tests/parity tests/models \
    tests/pallas_kernels tests/engine/test_advance.py tests/engine/test_llm_fields.py \
    tests/engine/test_sampling_rules.py
  make_venv .venv-aot "$python" "[test,aot]"
  echo "==> compiled ahead of time"
  .venv-aot/bin/python -m pytest "${parallel[@]}" tests/aot
fi
echo "==> all passed"
