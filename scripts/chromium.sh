#!/bin/sh
# See to it that a Chromium is there: a test looks at the page of /ui in it.
# Installs Debian's package where that takes no password; otherwise says in one line what to install.
set -eu

# One that says its version: what some systems call chromium only says how to install it.
found() {
    for each in "${CHROMIUM:-}" chromium google-chrome; do
        [ -n "$each" ] && "$each" --version 2>/dev/null | grep -q '[0-9]\.' && return 0
    done
    return 1
}

found && exit 0

sudo=
if [ "$(id -u)" -ne 0 ]; then sudo='sudo -n'; fi

if command -v apt-get >/dev/null 2>&1 && $sudo true 2>/dev/null; then
    echo 'installing chromium, in which a test looks at the page'
    $sudo apt-get update -qq >&2 || true
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2 || true
fi

found || { echo 'the tests need Chromium: install it (Debian: chromium), or set CHROMIUM to its path' >&2; exit 1; }
