#!/bin/sh
# Print a Python 3.11 or later that can make a virtual environment; otherwise say in one line what is missing.
set -eu

for python in python3.13 python3.12 python3.11 python3 python; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    # Debian splits venv off: the module is there, what it needs to install pip is not.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || { without_venv=$python; continue; }
    command -v "$python"
    exit 0
done

if [ -n "${without_venv-}" ]; then
    echo "$without_venv cannot make a virtual environment: install python3-venv" >&2
else
    echo 'Waymark needs Python 3.11 or later: install python3 and python3-venv' >&2
fi
exit 1
