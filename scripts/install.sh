#!/bin/sh
# Put the command waymark of this checkout on the PATH of this user, in an environment of its own, with uv or pipx.
set -eu

package='.[demo]'
if command -v uv >/dev/null 2>&1; then
    echo 'installing the command waymark with uv'
    uv tool install --quiet --force "$package"
    bin=$(uv tool dir --bin)
elif command -v pipx >/dev/null 2>&1; then
    echo 'installing the command waymark with pipx'
    pipx install --quiet --force "$package"
    bin=$(pipx environment --value PIPX_BIN_DIR)
else
    echo "make install needs uv or pipx: install one of them, or run 'make demo', which makes an environment in .venv" >&2
    exit 1
fi
"$bin/waymark" --version
case ":$PATH:" in
*":$bin:"*) ;;
*) echo "for the command waymark in a shell: export PATH=\"$bin:\$PATH\"" ;;
esac
