#!/bin/sh
# The sampled form finds nothing wrong, and has a sample for every rule.
exec "$1" --json
