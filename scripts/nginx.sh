#!/bin/sh
# See to it that nginx is there: a test runs replicas behind one.
# Installs Debian's package where that takes no password; otherwise says in one line what to install.
set -eu

# Debian keeps it where only root looks.
PATH=$PATH:/usr/local/sbin:/usr/sbin
found() { command -v nginx >/dev/null 2>&1; }

found && exit 0

sudo=
if [ "$(id -u)" -ne 0 ]; then sudo='sudo -n'; fi

if command -v apt-get >/dev/null 2>&1 && $sudo true 2>/dev/null; then
    echo 'installing nginx, behind which a test runs replicas'
    $sudo apt-get update -qq >&2 || true
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx >&2 || true
fi

found || { echo 'the tests need nginx: install it (Debian, Ubuntu, macOS with brew: nginx)' >&2; exit 1; }
