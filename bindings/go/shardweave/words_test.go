package shardweave

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// readHeader is shardweave.h, as the compiler finds it.
func readHeader(t *testing.T) string {
	t.Helper()
	flags := os.Getenv("CGO_CFLAGS")
	config := os.Getenv("PKG_CONFIG")
	if config == "" {
		config = "pkg-config"
	}
	if out, err := exec.Command(config, "--variable=includedir", "shardweave").Output(); err == nil && len(out) > 1 {
		flags += " -I" + strings.TrimSpace(string(out))
	}
	for _, flag := range strings.Fields(flags) {
		if text, err := os.ReadFile(filepath.Join(strings.TrimPrefix(flag, "-I"), "shardweave.h")); err == nil {
			return string(text)
		}
	}
	t.Fatalf("there is no shardweave.h where the compiler looks: %s", flags)
	return ""
}

// exported are the names that a program can write: "Ones", "Tensor.Add", "Grad"; and the arguments of
// functions.
func exported(t *testing.T) (names map[string]bool, arguments map[string]map[string]bool) {
	t.Helper()
	packages, err := parser.ParseDir(token.NewFileSet(), ".",
		func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	arguments = map[string]map[string]bool{}
	for _, file := range packages["shardweave"].Files {
		for _, declared := range file.Decls {
			switch d := declared.(type) {
			case *ast.FuncDecl:
				name := d.Name.Name
				if d.Recv != nil {
					kind := d.Recv.List[0].Type
					if star, is := kind.(*ast.StarExpr); is {
						kind = star.X
					}
					if of, is := kind.(*ast.Ident); is {
						name = of.Name + "." + name
					}
				}
				all[name] = ast.IsExported(d.Name.Name)
				arguments[name] = map[string]bool{}
				for _, field := range d.Type.Params.List {
					for _, argument := range field.Names {
						arguments[name][argument.Name] = true
					}
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch s := spec.(type) {
					case *ast.TypeSpec:
						all[s.Name.Name] = s.Name.IsExported()
					case *ast.ValueSpec:
						for _, name := range s.Names {
							all[name.Name] = name.IsExported()
						}
					}
				}
			}
		}
	}
	return all, arguments
}

// Whatever of the header a message names, it is in Go's spelling; and what this module uses of it has a
// name here that a program can write.
func TestEveryNameOfCIsOneOfGo(t *testing.T) {
	header := readHeader(t)
	names, arguments := exported(t)
	all := map[string]bool{}
	for _, name := range regexp.MustCompile(`\b(swv_\w+|SWV_[A-Z0-9_]+)`).FindAllString(header, -1) {
		all[name] = true
	}
	for name := range all {
		if name == "SWV_CHECK_HANDLES" {
			continue
		}
		for _, message := range []string{name + ": argument 'x' is bad", "swv_op_call: take " + name + " of it", "a " + name + "."} {
			if text := inGo(message); strings.Contains(strings.ToLower(text), "swv") || text == "" {
				t.Errorf("%q becomes %q", message, text)
			}
		}
	}
	sources, err := filepath.Glob("../internal/cshardweave/*")
	if err != nil {
		t.Fatal(err)
	}
	// What errors cannot name, and words of English.
	inner := regexp.MustCompile(`^swv_(status_.*|string_.*|value_clear|version|code|code_name|bool)$`)
	plain := regexp.MustCompile(`^[a-z ]+$`)
	used := 0
	declared := regexp.MustCompile(`\bSWV_API\b[^;]*?\b(swv_\w+)\(`)
	functions := map[string]bool{}
	for _, found := range declared.FindAllStringSubmatch(header, -1) {
		functions[found[1]] = true
	}
	for _, file := range sources {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range cFunction.FindAllString(string(text), -1) {
			if !functions[name] || inner.MatchString(name) {
				continue
			}
			used++
			checkArguments(t, header, name, arguments[goName(name)])
			if word := goName(name); !names[word] && !plain.MatchString(word) {
				t.Errorf("%s is %s in errors, and there is no such thing", name, word)
			}
		}
	}
	if len(all) < 300 || len(functions) < 150 || used < 150 {
		t.Errorf("only %d names and %d functions were found in the header, and %d in use", len(all), len(functions), used)
	}
	for name, word := range words {
		if !names[word] && !plain.MatchString(word) && word != name {
			t.Errorf("%s is %s in errors, and there is no such thing", name, word)
		}
	}
	for _, c := range [][2]string{{"wanted SWV_MODE_GRAD, SWV_MODE_NO_GRAD or SWV_MODE_INFERENCE", "wanted Grad, NoGrad or Inference"},
		{"swv_tensor_ones: argument 'sizes' is bad", "argument 'sizes' is bad"}, {"wanted SWV_DEVICE_CPU or SWV_DEVICE_CUDA", "wanted CPU or CUDA"},
		{"swv_op_call: aten::mm: swv_tensor_detach it", "aten::mm: Tensor.Detach it"}} {
		if got := inGo(c[0]); got != c[1] {
			t.Errorf("%q becomes %q, wanted %q", c[0], got, c[1])
		}
	}
}

// checkArguments: what an error about an argument of C's function names is an argument of Go's, or no argument.
func checkArguments(t *testing.T, header, function string, ofGo map[string]bool) {
	t.Helper()
	declared := regexp.MustCompile(`\bSWV_API\b[^;]*?\b` + function + `\(([^;]*?)\);`).FindStringSubmatch(header)
	// Counts are those of slices; Go makes the others by itself.
	own := regexp.MustCompile(`^(num_.*|\w*ndim|capacity|out_.*|mode|options|function|grad_layout|state|names|\w*scope|mesh_dim|dim)$`)
	out := regexp.MustCompile(`^\s*(int32_t|int64_t|void|swv_\w*_counter|swv_\w*_cost)\* ?\w+$`)
	for _, parameter := range strings.Split(declared[1], ",") {
		words := strings.FieldsFunc(parameter, func(r rune) bool { return !(r == '_' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9') })
		if len(words) < 2 || own.MatchString(words[len(words)-1]) || out.MatchString(parameter) || strings.HasPrefix(function, "swv_dtype_") {
			continue
		}
		name := words[len(words)-1]
		text := inGo(function + ": argument '" + name + "' is bad")
		if argument := leadingArgument.FindStringSubmatch(text); argument != nil && ofGo != nil && !ofGo[argument[1]] {
			t.Errorf("%s: %s", goName(function), text)
		}
	}
}
