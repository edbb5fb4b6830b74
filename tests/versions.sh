#!/usr/bin/env bash
# Unit tests and stored chapters at both ends of what pyproject.toml allows.
#   tests/versions.sh [python3.11 python3.13 ...]     (default: every python3.11 to 3.13 on the path)
# The oldest Python gets the lowest allowed releases, every Python the newest ones.
set -euo pipefail
cd "$(dirname "$0")/.."
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for name in python3.11 python3.12 python3.13; do
    command -v "$name" >/dev/null && pythons+=("$name")
  done
fi
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

run() {  # python, label, constraints file or nothing, further options of pytest
  local env="$home/$2"
  "$1" -m venv "$env"
  "$env/bin/python" -m pip --disable-pip-version-check -q install ${3:+-c "$3"} -e '.[lab,test]'
  echo "== $2: $("$env/bin/python" -c 'import sys, numpy, matplotlib, ipywidgets
print(sys.version.split()[0], "numpy", numpy.__version__, "matplotlib", matplotlib.__version__,
      "ipywidgets", ipywidgets.__version__)')"
  local pytest=("$env/bin/python" -m pytest -q -p no:cacheprovider "${@:4}")
  "${pytest[@]}" --ignore tests/browser --ignore tests/kernels tests kvlib
  "${pytest[@]}" --nbval --nbval-sanitize-with tests/nbval.cfg notebooks/[0-9]*.ipynb
}

# The lower bounds that pyproject.toml names, for packages that kvlib itself uses.
"${pythons[0]}" - >"$home/lowest.txt" <<'PY'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for line in [*project["dependencies"], *project["optional-dependencies"]["lab"]]:
    name, low = re.match(r"([\w-]+)>=([\d.]+)", line).groups()
    print(f"{name}=={low}.*")
PY
cat "$home/lowest.txt"
# Old releases beside new dependencies of their own: matplotlib 3.8 calls what pyparsing deprecates.
run "${pythons[0]}" "lowest" "$home/lowest.txt" -W ignore::DeprecationWarning
for python in "${pythons[@]}"; do
  run "$python" "newest-$(basename "$python")" ""
done
