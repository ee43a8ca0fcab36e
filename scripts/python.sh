#!/bin/sh
# Print the path of a Python 3.11 or later that can make a virtual environment; otherwise say in one line what is
# missing. A Python that was built with profile-guided optimization is preferred, since it needs a tenth less time for
# the tests.
set -eu

# Distributions optimize the Python in /usr, but its configure arguments may not say so. The C module needs the headers.
optimized='
import os, sys, sysconfig
is_optimized = sys.base_prefix == "/usr" or "--enable-optimizations" in sysconfig.get_config_var("CONFIG_ARGS")
sys.exit(not is_optimized or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'

IFS=:
for name in python3.13 python3.12 python3.11 python3 python; do
    for directory in $PATH; do
        python=$directory/$name
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        # Debian has venv in a package of its own: without it the module exists, but cannot install pip.
        "$python" -c 'import ensurepip, venv' 2>/dev/null || { without_venv=$python; continue; }
        if "$python" -c "$optimized" 2>/dev/null; then
            echo "$python"
            exit 0
        fi
        found=${found-$python}
    done
done

if [ -n "${found-}" ]; then
    echo "$found"
    exit 0
fi
if [ -n "${without_venv-}" ]; then
    echo "$without_venv cannot make a virtual environment: install python3-venv" >&2
else
    echo 'Waymark needs Python 3.11 or later: install python3 and python3-venv' >&2
fi
exit 1
