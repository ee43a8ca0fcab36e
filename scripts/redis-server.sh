#!/bin/sh
# Make sure that a real redis-server (or valkey-server) is on PATH, because the tests run against one. Installs Debian's
# package if that needs no password; otherwise says in one line what to install.
set -eu

found() { command -v redis-server >/dev/null 2>&1 || command -v valkey-server >/dev/null 2>&1; }

found && exit 0

sudo=
if [ "$(id -u)" -ne 0 ]; then sudo='sudo -n'; fi

if command -v apt-get >/dev/null 2>&1 && $sudo true 2>/dev/null; then
    echo 'installing redis-server, which the tests run against'
    $sudo apt-get update -qq >&2 || true
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >&2 || true
fi

found || { echo 'the tests need a redis-server on PATH: install Redis 6.2 or later (Debian, Ubuntu: redis-server; macOS: brew install redis)' >&2; exit 1; }
