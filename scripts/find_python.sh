# Sourced. find_python [VERSION]: print the newest Python from 3.11 up (or exactly VERSION, such as
# 3.11), from PATH and then from pyenv's versions. PYTHON, if set, wins when no VERSION is asked for.

python_version() { # prints "3 13" if the command runs and is new enough
  "$1" -c 'import sys; v = sys.version_info[:2]; print(*v) if v >= (3, 11) else sys.exit(1)' 2>/dev/null
}

find_python() {
  local want="${1:-}" best="" best_minor=0 candidate version minor
  if [ -z "$want" ] && [ -n "${PYTHON:-}" ]; then
    if ! python_version "$PYTHON" >/dev/null; then
      echo "error: PYTHON=$PYTHON does not run or is older than 3.11" >&2
      return 1
    fi
    echo "$PYTHON"
    return 0
  fi
  local roots="${PYENV_ROOT:-$HOME/.pyenv}/versions"
  for candidate in python3.14 python3.13 python3.12 python3.11 python3 python "$roots"/3.*/bin/python; do
    case "$candidate" in
      /*) [ -x "$candidate" ] || continue ;;
      *) command -v "$candidate" >/dev/null 2>&1 || continue ;;
    esac
    version="$(python_version "$candidate")" || continue
    minor="${version#3 }"
    if [ -n "$want" ] && [ "3.$minor" != "$want" ]; then continue; fi
    if [ "$minor" -gt "$best_minor" ]; then best="$candidate" best_minor="$minor"; fi
  done
  if [ -z "$best" ]; then
    echo "error: no Python ${want:-3.11 or newer} found on PATH or among pyenv's versions;" \
      "install one${want:+ (needed for this step)} or set PYTHON" >&2
    return 1
  fi
  echo "$best"
}

# make_venv DIRECTORY PYTHON EXTRAS: create the environment if it is not there, install the project.
make_venv() {
  local dir="$1" python="$2" extras="$3"
  if ! "$dir/bin/python" -c 'import pip' >/dev/null 2>&1; then
    echo "==> $dir: new virtual environment with $("$python" --version)"
    rm -rf "$dir"
    "$python" -m venv "$dir"
  fi
  echo "==> $dir: installing pallasite$extras"
  # Python compiles what is imported; compiling all of it here takes as long as the rest.
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --editable ".$extras"
}
