package cshardweave

// #include "shim.h"
import "C"

// LoadPretrained is swv_load_pretrained_options.
type LoadPretrained struct {
	Ignored                                     []string
	AllowMissing, AllowUnexpected, AllowUnknown bool
}

// SavePretrained is swv_save_pretrained_options.
type SavePretrained struct {
	Ignored      []string
	MaxFileBytes int64
	DType        int32
}

func ReadPretrainedConfig(directory string, allowUnknown bool) (string, error) {
	if err := checkText("directory", directory); err != nil {
		return "", err
	}
	var a arena
	defer a.free()
	var out *C.swv_string
	if err := result(C.swv_read_pretrained_config(a.text(directory), flag(allowUnknown), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func ModuleLoadPretrained(m Module, path string, mesh Mesh, o LoadPretrained) (string, error) {
	if err := checkText("path", append([]string{path}, o.Ignored...)...); err != nil {
		return "", err
	}
	var a arena
	defer a.free()
	var out *C.swv_string
	if err := result(C.swvgo_module_load_pretrained(m, a.text(path), mesh, a.list(o.Ignored), C.size_t(len(o.Ignored)),
		flag(o.AllowMissing), flag(o.AllowUnexpected), flag(o.AllowUnknown), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func ModuleSavePretrained(m Module, directory, config string, mesh Mesh, o SavePretrained) error {
	if err := checkText("a directory or a configuration", append([]string{directory, config}, o.Ignored...)...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_module_save_pretrained(m, a.text(directory), a.text(config), mesh, a.list(o.Ignored),
		C.size_t(len(o.Ignored)), C.int64_t(o.MaxFileBytes), C.swv_dtype(o.DType)))
}
