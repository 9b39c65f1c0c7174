#!/usr/bin/env bash
# Runs the staticcheck that fits the Go on the PATH: staticcheck.sh ./... It is fetched once, by Go, at the version below (whose
# sum Go compares with the public record), and kept in the user's cache. Shardweave's Go module does not depend on it.
set -euo pipefail
minor=$(go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
# Each release wants at least some Go, and may not understand the code of a much newer one.
if ((${minor:-99} >= 26)); then version=v0.8.2
elif ((minor >= 25)); then version=v0.7.0
elif ((minor >= 23)); then version=v0.6.1
else version=v0.4.7; fi
export GOBIN=${XDG_CACHE_HOME:-$HOME/.cache}/shardweave/staticcheck/$version-$(go env GOVERSION)
# Of a module of its own: nothing of this one's flags holds for it.
[[ -x $GOBIN/staticcheck ]] || (cd / && env -u CGO_CFLAGS -u CGO_LDFLAGS GOFLAGS= GOTOOLCHAIN=local go install "honnef.co/go/tools/cmd/staticcheck@$version") || {
  echo "staticcheck $version could not be fetched: set GOPROXY to where honnef.co/go/tools is; or put the program there: $GOBIN" >&2
  exit 1
}
"$GOBIN/staticcheck" "$@"
