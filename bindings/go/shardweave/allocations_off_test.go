//go:build !go1.24 || race

package shardweave_test

const countsAllocations = false
