#!/usr/bin/env bash
# The command as users run it: what it skips where there is no GPU, and why; what it writes; mistakes.
set -euo pipefail
program=$(readlink -f -- "$1")
cd "$TEST_TMPDIR"
fail() { echo "$1"; exit 1; }
wants() { [[ $1 == *"$2"* ]] || fail "no '$2' in: $1"; }
# LibTorch's GPUs, where there are some, are none here.
export CUDA_VISIBLE_DEVICES=

text=$("$program" --quick) || fail "exit code $? without a GPU: $text"
wants "$text" "machine"
wants "$text" " 0 failed"
wants "$text" "skipped"
wants "$text" "CUDA"
! grep -qE "^collectives +passed" <<<"$text" || fail "collectives without a GPU: $text"

json=$("$program" --json --output=report.json) || fail "exit code $? without a GPU: $json"
[[ $json == "$(cat report.json)" ]] || fail "another report in the file: $(cat report.json)"
wants "$json" '"ok":true'
wants "$json" '"outcome":"skipped"'
python3 - report.json <<'END'
import json
import sys
with open(sys.argv[1], encoding="utf-8") as opened:
    report = json.load(opened)
checks = {c["name"]: c for c in report["checks"]}
assert report["ranks"] == 1 and report["rank"] == 0, report
assert checks["machine"]["outcome"] == "passed" and checks["machine"]["facts"]["LibTorch"], checks["machine"]
rest = [c for name, c in checks.items() if name != "machine"]
assert len(rest) >= 12, checks.keys()
for check in rest:
    assert check["outcome"] == "skipped" and check["why"], check
END

two=$("$program" --ranks=2 --only=collectives) || fail "exit code $? on two ranks: $two"
wants "$two" "2 ranks: 1 passed, 0 failed, 2 skipped"

# Copied to where Bazel is not.
libraries=$(ldd "$program" | awk '$3 ~ /_solib/ {sub(/\/[^\/]*$/, "", $3); print $3}' | sort -u | paste -sd:)
cp "$program" copied
copied=$(LD_LIBRARY_PATH=$libraries ./copied) || fail "the copy has failed: $copied"
wants "$copied" " 0 failed"

help=$("$program" --help)
wants "$help" "--output=FILE"
wants "$help" "training"

refuses() {
  local why=$1 out
  shift
  if out=$("$program" "$@" 2>&1); then fail "no error for $*: $out"; fi
  wants "$out" "$why"
}
refuses "no_such_flag" --no_such_flag
refuses "'word': wanted flags only" word
refuses 'there is no check "nothing"; there are machine, join, collectives' --only=nothing
refuses "cannot be written" --output=/no/such/directory/report.json
refuses "wanted 1 or more" --ranks=-1
refuses "above 0" --timeout=0
RANK=0 WORLD_SIZE=x refuses "WORLD_SIZE" --quick
echo PASS
