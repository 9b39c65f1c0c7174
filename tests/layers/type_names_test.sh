#!/usr/bin/env bash
set -euo pipefail
exec python3 tests/layers/type_names_test.py "$(dirname -- "$(readlink -f -- WORKSPACE)")"
