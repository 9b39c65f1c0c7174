//go:build race

package shardweave_test

const raceEnabled = true
