#!/usr/bin/env bash
# Every test that needs a CUDA device, against a copy of the package as a user installs it. PYTHON names the
# interpreter, LOG the file that keeps what is printed; arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
log=${LOG:-$root/benchmarks/results/gpu-tests.log}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
commit=${GLM5NEXT_COMMIT:-$(git -C "$root" describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)}

# away from the source tree, which would shadow the installed package
cp -r "$root/tests" "$work/tests"
"$python" -m pip install --quiet --no-deps --no-build-isolation --no-index --target "$work/package" "$root"
cd "$work"
export GLM5NEXT_COMMIT=$commit PYTHONPATH="$work/package${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$(dirname "$log")"
"$python" -m pytest -p no:cacheprovider tests/gpu "$@" 2>&1 | tee "$log"
