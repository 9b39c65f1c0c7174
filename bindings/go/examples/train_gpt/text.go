package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// randomAt is the i-th number of a stream, by its seed and i alone, so that every rank of every run draws
// the same. SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
func randomAt(seed, index uint64) uint64 {
	mix := func(z uint64) uint64 {
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
		z = (z ^ (z >> 27)) * 0x94d049bb133111eb
		return z ^ (z >> 31)
	}
	return mix(mix(seed) + (index+1)*0x9e3779b97f4a7c15)
}

// uniformAt is in [0, 1).
func uniformAt(seed, index uint64) float64 { return float64(randomAt(seed, index)>>11) * 0x1p-53 }

const licences = "/usr/share/common-licenses"

// readText reads the file, or "": Debian's licence texts, in the order of their names.
func readText(file string) ([]byte, error) {
	files := []string{file}
	if file == "" {
		files = nil
		entries, _ := os.ReadDir(licences)
		for _, entry := range entries { // links only repeat what is there already
			if entry.Type().IsRegular() {
				files = append(files, filepath.Join(licences, entry.Name()))
			}
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("no text to train on: there is nothing in %s; name one by --data=FILE", licences)
		}
	}
	var text []byte
	for _, name := range files {
		bytes, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("--data=%s: %w", name, err)
		}
		text = append(text, bytes...)
	}
	if len(text) == 0 {
		return nil, fmt.Errorf("--data=%s: the file is empty", file)
	}
	return text, nil
}

// toTokens is the bytes as numbers.
func toTokens(bytes []byte) []int64 {
	tokens := make([]int64, len(bytes))
	for i, b := range bytes {
		tokens[i] = int64(b)
	}
	return tokens
}

// batchOf is the sequences of a step, one behind the other; targets are one byte further on.
func batchOf(text []byte, s *settings, step int64) (tokens, targets []int64) {
	starts := uint64(len(text)) - uint64(s.seq)
	for row := int64(0); row < s.batch; row++ {
		start := randomAt(s.seed, uint64(step*s.batch+row)) % starts
		tokens = append(tokens, toTokens(text[start:start+uint64(s.seq)])...)
		targets = append(targets, toTokens(text[start+1:start+uint64(s.seq)+1])...)
	}
	return tokens, targets
}
