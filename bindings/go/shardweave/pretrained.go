package shardweave

import (
	"encoding/json"
	"sort"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// ReadPretrainedConfig is the config.json of a directory that Hugging Face's transformers has written, as it stands there, if
// it describes what a model of the library's computes: for [World.ModuleByKind], or for a model that the program writes. An
// error says line and key. Of the options [AllowUnknownKeys] counts. Sends nothing.
func ReadPretrainedConfig(directory string, options ...LoadPretrainedOption) (string, error) {
	text, err := c.ReadPretrainedConfig(directory, loadPretrained(options).AllowUnknown)
	return text, public(err)
}

// LoadPretrainedOption is an option of [Module.LoadPretrained]: what is no error.
type LoadPretrainedOption func(*c.LoadPretrained)

// AllowMissingWeights leaves what the files have not as it is: a classifier that is new.
func AllowMissingWeights() LoadPretrainedOption {
	return func(o *c.LoadPretrained) { o.AllowMissing = true }
}

// AllowUnexpectedWeights leaves out what the module has not.
func AllowUnexpectedWeights() LoadPretrainedOption {
	return func(o *c.LoadPretrained) { o.AllowUnexpected = true }
}

// AllowUnknownKeys passes over keys of config.json that the library does not know.
func AllowUnknownKeys() LoadPretrainedOption {
	return func(o *c.LoadPretrained) { o.AllowUnknown = true }
}

func loadPretrained(options []LoadPretrainedOption) c.LoadPretrained {
	var o c.LoadPretrained
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return o
}

// LoadedPretrained is what LoadPretrained has done.
type LoadedPretrained struct {
	Kind       string   `json:"kind"`       // "llama", ...; "" without a config.json
	Missing    []string `json:"missing"`    // in files' names, with AllowMissingWeights
	Unexpected []string `json:"unexpected"` // with AllowUnexpectedWeights
	BytesRead  int64    `json:"bytes_read"` // of tensors, by this rank
	BytesKept  int64    `json:"bytes_kept"`
}

// LoadPretrained gives the module the values of a model that Hugging Face's transformers has saved, in place, on any mesh
// under any plan; each rank reads what it keeps. The path is a directory of config.json and weights, a file of weights
// (safetensors, or what torch.save has written), or a directory of PyTorch's distributed checkpoints. Names are those of the
// library's models, which are Hugging Face's nearly everywhere; tensors that are transient stay as they are ([World.ModuleOf]).
// Another floating-point type is converted.
//
//	config, err := sw.ReadPretrainedConfig("llama")
//	model, err := w.ModuleByKind("llama", config)
//	plan, err := mesh.ZooPlan("llama", config, "")
//	err = model.Distribute(mesh, plan, sw.FromRank(0))
//	loaded, err := model.LoadPretrained("llama", mesh)
//	err = model.SavePretrained("tuned", config, mesh, sw.WithSavedDType(sw.BF16))
//
// One message has all that is missing, unexpected or of another shape or type. Errors are the same on all ranks, before
// anything is changed. Collective.
func (m *Module) LoadPretrained(path string, mesh *Mesh, options ...LoadPretrainedOption) (LoadedPretrained, error) {
	var loaded LoadedPretrained
	text, err := ask(func(*rank) (string, error) {
		o := loadPretrained(options)
		o.Ignored = m.transients()
		return c.ModuleLoadPretrained(m.handle, path, mesh.handle, o)
	}, m, mesh)
	if err == nil {
		err = json.Unmarshal([]byte(text), &loaded)
	}
	return loaded, err
}

// transients are the FQNs of what is in no file, in the same order on all ranks.
func (m *Module) transients() []string {
	var names []string
	for name := range m.transient {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// SavePretrainedOption is an option of [Module.SavePretrained].
type SavePretrainedOption func(*c.SavePretrained)

// WithMaxFileBytes has a file end before a tensor with which it would have more; else 5 GB.
func WithMaxFileBytes(bytes int64) SavePretrainedOption {
	return func(o *c.SavePretrained) { o.MaxFileBytes = bytes }
}

// WithSavedDType writes floating-point tensors as this; else as they are.
func WithSavedDType(dtype DType) SavePretrainedOption {
	return func(o *c.SavePretrained) { o.DType = int32(dtype) }
}

// SavePretrained writes a directory, which is not there yet, that transformers loads: the configuration, which is the text of
// a config.json of this model, and the values in safetensors files under its names. It is there whole, or not at all. Tensors
// are gathered one at a time. The configuration of another model is an error, with all names that differ. Collective.
func (m *Module) SavePretrained(directory, config string, mesh *Mesh, options ...SavePretrainedOption) error {
	o := c.SavePretrained{MaxFileBytes: c.DefaultSavePretrainedMaxFileBytes}
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return do(func(*rank) error {
		o.Ignored = m.transients()
		return c.ModuleSavePretrained(m.handle, directory, config, mesh.handle, o)
	}, m, mesh)
}
