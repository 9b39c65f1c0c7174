package main

import (
	"fmt"
	"io"
	"strings"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// printLayouts tells how each parameter lies on the mesh; one line for those that all blocks have alike.
func printLayouts(m *gpt, mesh *sw.Mesh, out io.Writer) error {
	fmt.Fprintf(out, "%v, S(d): cut along dimension d, R: replicated\n", mesh)
	fmt.Fprintf(out, "  %-22s %-12s %-14s %s\n", "parameter", "shape", "placements", "on rank 0")
	parameters, err := m.Parameters()
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, p := range parameters {
		sizes, err := p.Sizes()
		if err != nil {
			return err
		}
		layout, err := p.Layout()
		if err != nil {
			return err
		}
		local := p.Detach().Local()
		part, err := local.Sizes()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("  %-22s %-12s %-14s %s\n", withoutNumbers(p.Name), shape(sizes), layout, shape(part))
		if !seen[line] {
			io.WriteString(out, line)
		}
		seen[line] = true
	}
	return nil
}

// withoutNumbers makes "blocks.*.q.weight" of "blocks.3.q.weight".
func withoutNumbers(name string) string {
	parts := strings.Split(name, ".")
	for i, part := range parts {
		if strings.Trim(part, "0123456789") == "" {
			parts[i] = "*"
		}
	}
	return strings.Join(parts, ".")
}

func shape(sizes []int64) string { return strings.ReplaceAll(fmt.Sprint(sizes), " ", ", ") }

// printSample shows bytes that are no printable ASCII as '?'.
func printSample(prompt, generated []byte, out io.Writer) {
	printable := func(text []byte) []byte {
		shown := append([]byte(nil), text...)
		for i, b := range shown {
			if b != '\n' && b != '\t' && (b < ' ' || b > '~') {
				shown[i] = '?'
			}
		}
		return shown
	}
	fmt.Fprintf(out, "sample, after %d bytes of the text:\n%s ... %s\n", len(prompt), printable(prompt), printable(generated))
}
