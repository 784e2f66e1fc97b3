#!/usr/bin/env bash
# Makes .venv from requirements/cpu.txt and installs this checkout into it, editable. Returns at once if nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
ready=$venv/.glm5next-ready # what the finished environment was made from
unfinished=$venv/.glm5next-unfinished

works() {
  "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

fingerprint=$(cat requirements/cpu.txt pyproject.toml requirements/setup.sh | cksum; pwd -P)
if [ "$(cat "$ready" 2>/dev/null)" = "$fingerprint" ] && works; then
  exit 0
fi

if [ -e "$venv" ] && { [ -e "$unfinished" ] || ! works; }; then
  echo "setup: $venv is broken or unfinished; making it again"
  rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
  python=$(bash requirements/find-python.sh)
  echo "setup: $venv from $python"
  "$python" -m venv "$venv"
fi
rm -f "$ready"
touch "$unfinished"
echo "setup: installing requirements/cpu.txt (about 2.8 GB to download, 5.5 GB on disk)"
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements/cpu.txt
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
# where PYTHONDONTWRITEBYTECODE is set pip leaves that to each process, and one that imports Megatron takes seconds for it
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" || true # a few packages ship templates that are no Python
rm "$unfinished"
printf '%s\n' "$fingerprint" >"$ready"
echo "setup: done"
