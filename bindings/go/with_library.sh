#!/usr/bin/env bash
# Runs a command of Go in this module, on the library that Bazel has built: with_library.sh go test ./...
# Works in the runfiles of a Bazel target; elsewhere pkg-config finds an installed library, and this is not needed.
set -euo pipefail
command -v go >/dev/null || {
  echo "bindings/go: there is no 'go' on the PATH. Wanted: Go 1.19 or newer (Debian: apt-get install golang-go; or https://go.dev/dl)" >&2
  exit 1
}
capi=$PWD/capi
module=$(dirname -- "$(readlink -f -- bindings/go/go.mod)")
# Instead of pkg-config, of which the library knows only once it is installed.
PKG_CONFIG=$(mktemp)
export PKG_CONFIG
trap 'rm -f -- "$PKG_CONFIG"' EXIT
needed=$(find -L "$PWD/_solib_k8" -name '*.so*' -printf '%h\n' | sort -u | sed 's/^/-Wl,-rpath-link,/' | tr '\n' ' ')
cat >"$PKG_CONFIG" <<'SCRIPT'
#!/bin/sh
case "$*" in *--libs*) echo "-lshardweave" ;; esac
SCRIPT
chmod +x "$PKG_CONFIG"
# Go's build cache looks at these, and not at what pkg-config says: another checkout must not get this one's paths.
export CGO_CFLAGS="-g -O2 -I$capi"
export CGO_LDFLAGS="-g -O2 -L$capi -Wl,-rpath,$capi $needed"
cd -- "$module"
export GOFLAGS="-mod=readonly -buildvcs=false ${GOFLAGS:-}"
"$@"
