#!/usr/bin/env bash
# From nothing to generated text: makes .venv, installs, downloads SmolLM2-135M once, generates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/find_python.sh

python="$(find_python)"
make_venv .venv "$python" ""
echo "==> generating (the first run downloads 93 MB and compiles)"
.venv/bin/python scripts/generate.py "What is a page table? Answer in two sentences." \
  --model smollm2-135m --chat --max-tokens 64
echo "==> done. Try: .venv/bin/python scripts/chat.py"
