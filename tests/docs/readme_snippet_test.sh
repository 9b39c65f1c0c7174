#!/usr/bin/env bash
# readme_snippet_test.sh PROGRAM: the README's program trains, which is to say that its loss falls.
set -euo pipefail

output=$("$1")
awk '/^step / { last = $3; if (!seen++) first = $3 } END { print seen + 0 " losses, " first " to " last; exit !(seen == 50 && last < 0.8 * first) }' <<<"$output" ||
  { echo "$output" >&2; exit 1; }
