#!/usr/bin/env bash
# Every family of rules is in kRuleFamilies. One that is not is no error anywhere else: its operators
# would have no rules, and gather their inputs.
#
# families_test.sh FAMILIES_H SOURCE...
set -euo pipefail

listed=$(sed -n '/kRuleFamilies/,/};/p' "$1")
shift
families=$(grep -hoE '^void add_\w+_rules\(RuleTable& table\) \{' "$@" | sed -E 's/void (\w+).*/\1/')
[ "$(wc -w <<<"$families")" -ge 20 ] || { echo "found no families in: $*"; exit 1; }
status=0
for family in $families; do
  if ! grep -qw "$family" <<<"$listed"; then
    echo "$family() is not in kRuleFamilies (dtensor/rules/families.h)"
    status=1
  fi
done
exit $status
