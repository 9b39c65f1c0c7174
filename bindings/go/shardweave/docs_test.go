package shardweave_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"regexp"
	"strings"
	"testing"
)

var unkeyed = regexp.MustCompile(`\b[A-Z]\w*\{"[^"]*",.*`) // Device{"cpu", 0}, say

// What is exported is documented.
func TestDocumentation(t *testing.T) {
	for _, name := range []string{"shardweave", "nn", "safetensors"} {
		documented(t, name)
	}
}

func documented(t *testing.T, packageName string) {
	set := token.NewFileSet()
	folder := "."
	if packageName != "shardweave" {
		folder = packageName
	}
	packages, err := parser.ParseDir(set, folder, func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") },
		parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	d := doc.New(packages[packageName], "github.com/shardweave/shardweave/bindings/go/shardweave", 0)
	check := func(name, text string) {
		if text = strings.TrimSpace(text); text == "" || !strings.ContainsAny(text[len(text)-1:], ".)}") {
			t.Errorf("%s.%s: no documentation, or its end is missing: %q", packageName, name, text)
		}
		if found := unkeyed.FindString(text); found != "" {
			t.Errorf("%s: the documentation shows what go vet refuses in another package: %s", name, found)
		}
	}
	functions := func(of string, all []*doc.Func) {
		for _, f := range all {
			if f.Name != "Error" { // of the interface error
				check(of+f.Name, f.Doc)
			}
		}
	}
	values := func(all []*doc.Value) {
		for _, v := range all {
			check(strings.Join(v.Names, ", "), v.Doc)
		}
	}
	check("the package", d.Doc)
	functions("", d.Funcs)
	values(d.Consts)
	values(d.Vars)
	for _, kind := range d.Types {
		check(kind.Name, kind.Doc)
		functions("", kind.Funcs)
		functions(kind.Name+".", kind.Methods)
		values(kind.Consts)
		values(kind.Vars)
		ast.Inspect(kind.Decl, func(n ast.Node) bool {
			i, is := n.(*ast.InterfaceType)
			if !is {
				return true
			}
			for _, m := range i.Methods.List {
				if len(m.Names) == 1 && m.Names[0].IsExported() {
					check(kind.Name+"."+m.Names[0].Name, m.Doc.Text())
				}
			}
			return true
		})
	}
}
