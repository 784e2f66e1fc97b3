#!/usr/bin/env bash
# Prints a Python 3.12 that really runs and can make virtual environments. PYTHON=/path/to/python3.12 overrides the search.
set -euo pipefail

# A pyenv shim may be on PATH and refuse to run, and a distribution's python3.12 may come without venv: try each.
usable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

candidates() {
  local name pyenv
  for name in python3.12 python3 python; do
    command -v "$name" || true
  done
  pyenv=$(command -v python3.12 || command -v pyenv || true) # of a shim, the versions lie beside its folder
  ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 2>/dev/null || true
  ls -d "$(dirname "${pyenv:-/nowhere/x}")"/../versions/3.12*/bin/python3.12 2>/dev/null || true
  if command -v uv >/dev/null; then
    uv python find --no-python-downloads 3.12 2>/dev/null || true
  fi
}

if [ -n "${PYTHON:-}" ]; then
  if usable "$PYTHON"; then
    echo "$PYTHON"
    exit 0
  fi
  echo "setup: PYTHON=$PYTHON is not a Python 3.12 that runs and has venv and ensurepip" >&2
  exit 1
fi

while read -r candidate; do
  if usable "$candidate"; then
    echo "$candidate"
    exit 0
  fi
done < <(candidates)

cat >&2 <<'TEXT'
setup: no Python 3.12 that runs and has venv was found (on PATH, in pyenv's versions, through uv). Install one, e.g.
  apt-get install python3.12-venv    or    pyenv install 3.12    or    uv python install 3.12
or name one: make setup PYTHON=/path/to/python3.12
TEXT
exit 1
