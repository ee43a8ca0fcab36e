#!/bin/sh
# Make sure that a program for the tests is installed: sh scripts/package.sh NAME WHAT_FOR [OTHER_NAME...]
# Installs Debian's package NAME if that needs no password; otherwise says in one line what to install.
set -eu

name=$1 purpose=$2
shift 2
# Debian keeps some programs in directories that are only on the PATH of root.
PATH=$PATH:/usr/local/sbin:/usr/sbin

# The program has to report its version: some systems have a stub of this name that only says how to install it.
found() {
    for each in "$name" "$@"; do
        [ -n "$each" ] && { "$each" --version || "$each" -v; } 2>&1 | grep -q '[0-9]\.' && return 0
    done
    return 1
}

found "$@" && exit 0

sudo=
if [ "$(id -u)" -ne 0 ]; then sudo='sudo -n'; fi

if command -v apt-get >/dev/null 2>&1 && $sudo true 2>/dev/null; then
    echo "installing $name, $purpose"
    $sudo apt-get update -qq >&2 || true
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" >&2 || true
fi

found "$@" || { echo "the tests need $name, $purpose: install it (Debian's package is $name)" >&2; exit 1; }
