#!/bin/sh
# Run the tests in one row of the matrix: sh scripts/matrix.sh ROW [arguments of pytest]
# Each row has an environment of its own below .matrix/. Exit code 3 says that the row cannot run on this machine.
set -eu
cd "$(dirname "$0")/.."

rows='python3.11 python3.12 python3.13 python3.14 redis6.2 redis7.4 redis8 valkey8 valkey9 pure native lowest'
row=${1-}
[ $# -eq 0 ] || shift
case " $rows " in
    *" $row "*) [ -n "$row" ] ;;
    *) false ;;
esac || { echo "ROW is '$row'; give one of: $rows" >&2; exit 2; }

command -v uv >/dev/null 2>&1 || { echo 'the matrix needs uv: pip install uv' >&2; exit 2; }
home="$PWD/.matrix/$row"
python=3.11
resolution=highest
case $row in
    python*) python=${PYTHON:-${row#python}} ;; # set PYTHON if it is not on the PATH
    lowest) resolution=lowest-direct ;;
    pure) export BUILD_NATIVE=never ;;
    native) export BUILD_NATIVE=always ;;
    redis* | valkey*)
        sh scripts/redis-version.sh "$row" "$home/server"
        PATH="$home/server:$PATH"
        ;;
esac

mkdir -p "$home"
# Use a copy, because an editable install of another row would put its C module into the checkout.
rm -rf "$home/source"
mkdir "$home/source"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$home/source" 2>/dev/null || true
cd "$home/source"

if [ ! -x "$home/venv/bin/python" ]; then
    uv venv --quiet --python "$python" "$home/venv" ||
        { echo "Python $python is not available here" >&2; exit 3; }
fi
uv pip install --quiet --resolution "$resolution" --python "$home/venv/bin/python" --editable '.[demo]' --group test
"$home/venv/bin/python" -m waymark --version
exec "$home/venv/bin/python" -m pytest -p no:cacheprovider --ignore=tests/test_lint.py "$@"
