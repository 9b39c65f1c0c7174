package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const asProgram = "TRAIN_LLAMA_TEST_IS_PROGRAM"

// The test program is the program too.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// program runs it, and has what it wrote.
func program(t *testing.T, args ...string) (out, messages string, code int) {
	t.Helper()
	p := exec.Command(os.Args[0], args...)
	p.Env = append(p.Env, asProgram+"=1", "OMP_NUM_THREADS=1")
	for _, variable := range os.Environ() { // a launcher around this test says nothing about the ranks in it
		switch strings.SplitN(variable, "=", 2)[0] {
		case "RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMP_NUM_THREADS":
		default:
			p.Env = append(p.Env, variable)
		}
	}
	var first, second bytes.Buffer
	p.Stdout, p.Stderr = &first, &second
	if err := p.Run(); err != nil && p.ProcessState == nil {
		t.Fatal(err)
	}
	return first.String(), second.String(), p.ProcessState.ExitCode()
}

type result struct {
	Ranks           int
	FirstLoss       float64  `json:"first_loss"`
	LastLoss        float64  `json:"last_loss"`
	TokensPerSecond float64  `json:"tokens_per_second"`
	MaxLossDiff     *float64 `json:"max_loss_diff"`
}

func trained(t *testing.T, args ...string) result {
	t.Helper()
	out, messages, code := program(t, append(args, "--json")...)
	var r result
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("%v: %d, %v\n%s%s", args, code, err, out, messages)
	}
	return r
}

// checkpoint is a folder as transformers writes it, of weights that are sines, in one file or in several.
func checkpoint(t *testing.T, config string, shapes map[string][]int64, dtype string, files int) string {
	t.Helper()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var names []string
	for name := range shapes {
		names = append(names, name)
	}
	sort.Strings(names)
	for file := 0; file < files; file++ {
		header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
		var data []byte
		for k, name := range names {
			if k%files != file {
				continue
			}
			begin, n := len(data), int64(1)
			for _, size := range shapes[name] {
				n *= size
			}
			for i := int64(0); i < n; i++ {
				value := 0.3 * math.Sin(0.37*float64(i)+float64(k))
				if strings.Contains(name, "norm") {
					value++
				}
				if dtype == "BF16" {
					data = binary.LittleEndian.AppendUint16(data, uint16(sw.BFloat16Of(float32(value))))
				} else {
					data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(value)))
				}
			}
			header[name] = map[string]any{"dtype": dtype, "shape": shapes[name], "data_offsets": []int{begin, len(data)}}
		}
		text, err := json.Marshal(header)
		if err != nil {
			t.Fatal(err)
		}
		all := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), append(text, data...)...)
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("model-%05d-of-%05d.safetensors", file+1, files)), all, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// shapesOf are the tensors of a Llama with two layers.
func shapesOf(heads int64, bias, head bool) map[string][]int64 {
	all := map[string][]int64{"model.embed_tokens.weight": {61, 24}, "model.norm.weight": {24}}
	if head {
		all["lm_head.weight"] = []int64{61, 24}
	}
	for _, layer := range []string{"model.layers.0.", "model.layers.1."} {
		for name, shape := range map[string][]int64{"input_layernorm.weight": {24}, "post_attention_layernorm.weight": {24},
			"self_attn.q_proj.weight": {4 * heads, 24}, "self_attn.k_proj.weight": {2 * heads, 24}, "self_attn.v_proj.weight": {2 * heads, 24}, "self_attn.o_proj.weight": {24, 4 * heads},
			"mlp.gate_proj.weight": {40, 24}, "mlp.up_proj.weight": {40, 24}, "mlp.down_proj.weight": {24, 40}} {
			all[layer+name] = shape
			if bias && strings.HasPrefix(name, "self_attn") {
				all[layer+strings.Replace(name, "weight", "bias", 1)] = shape[:1]
			}
		}
	}
	return all
}

const config24 = `{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
	"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu", `

// plain and tied are two checkpoints.
func plain(t *testing.T) string {
	return checkpoint(t, config24+`"rope_theta": 500.0, "rope_scaling": null, "tie_word_embeddings": false}`, shapesOf(6, false, true), "F32", 1)
}

func tied(t *testing.T) string {
	return checkpoint(t, config24+`"head_dim": 8, "attention_bias": true, "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3",
		"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}`, shapesOf(8, true, false), "BF16", 2)
}

// text is what the reference was trained on.
func text(t *testing.T) string {
	all := make([]byte, 500)
	for i := range all {
		all[i] = byte((i*i*7 + 3*i) % 251)
	}
	path := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(path, all, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The losses of the first and the fourth step are those of transformers 4.57 and torch 2.11: LlamaForCausalLM with these
// weights, attn_implementation eager, AdamW(lr=0.01 (0.1 + 0.45 (1 + cos(pi step / 4))), weight_decay=0.01) and
// clip_grad_norm_(1); on one device, and on every mesh: where heads and sequences do not divide, and ranks have nothing.
func TestTheLossesAreThoseOfTransformers(t *testing.T) {
	data := text(t)
	for folder, want := range map[string][2]float64{plain(t): {4.414736, 4.192324}, tied(t): {4.516063, 4.130881}} {
		for mesh, ranks := range map[string]int{"dp=1,tp=1": 1, "dp=2,tp=2": 4, "tp=3": 3, "dp=4": 4, "dp=1,tp=5": 5} {
			r := trained(t, "--model="+folder, "--data="+data, "--mesh="+mesh, "--backend=inproc", "--steps=4", "--batch=3", "--seq=8", "--lr=0.01", "--check")
			if r.Ranks != ranks || math.Abs(r.FirstLoss-want[0]) > 2e-6*want[0] || math.Abs(r.LastLoss-want[1]) > 2e-5*want[1] ||
				!(*r.MaxLossDiff <= 1e-5*want[0]) || !(r.TokensPerSecond > 0) {
				t.Errorf("%s: %+v (%v), wanted losses %v", mesh, r, *r.MaxLossDiff, want)
			}
		}
	}
}

func TestProcesses(t *testing.T) {
	args := []string{"--model=" + plain(t), "--data=" + text(t), "--mesh=dp=1,tp=2", "--steps=3", "--batch=2", "--seq=8"}
	goroutines, processes := trained(t, append(args, "--backend=inproc")...), trained(t, append(args, "--backend=gloo")...)
	if processes.Ranks != 2 || math.Abs(goroutines.LastLoss-processes.LastLoss) > 1e-5 {
		t.Errorf("%+v and %+v", goroutines, processes)
	}
}

func TestRandomWeights(t *testing.T) {
	r := trained(t, "--data="+text(t), "--steps=20", "--batch=4", "--seq=16", "--lr=0.01", "--mesh=dp=2,tp=2", "--check")
	if math.Abs(r.FirstLoss-math.Log(256)) > 0.1 || !(r.LastLoss < r.FirstLoss-0.5) || !(*r.MaxLossDiff <= 1e-4) {
		t.Errorf("%+v, %v", r, *r.MaxLossDiff)
	}
}

// With the losses that the run without a break has, on other meshes.
func TestARunGoesOn(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "run")
	args := []string{"--model=" + plain(t), "--data=" + text(t), "--backend=inproc", "--steps=4", "--batch=3", "--seq=8", "--lr=0.01"}
	whole := trained(t, append(args, "--mesh=dp=2,tp=2", "--save="+directory, "--save_every=2")...)
	if _, messages, code := program(t, append(args, "--mesh=tp=2", "--resume="+directory)...); code != exitFailed || !strings.Contains(messages, "wanted more than 4, as --resume has") {
		t.Errorf("%d, %s", code, messages)
	}
	if err := os.RemoveAll(filepath.Join(directory, "step-000004")); err != nil {
		t.Fatal(err)
	}
	for _, mesh := range []string{"tp=3", "dp=1", "dp=2,tp=2"} {
		rest := trained(t, append(args, "--mesh="+mesh, "--check", "--resume="+directory)...)
		if !(*rest.MaxLossDiff <= 1e-5*whole.FirstLoss) || math.Abs(rest.LastLoss-whole.LastLoss) > 1e-5*whole.LastLoss || !(rest.FirstLoss < whole.FirstLoss) {
			t.Errorf("%s: %+v (%v), wanted %+v", mesh, rest, *rest.MaxLossDiff, whole)
		}
	}
}

// Told to end, it saves the step that it is in: what goes on from there ends as the run that nobody has told. Ranks that are
// processes hear of it from the one that has started them.
func TestARunIsToldToEnd(t *testing.T) {
	args := []string{"--model=" + plain(t), "--data=" + text(t), "--steps=300", "--batch=3", "--seq=8", "--mesh=dp=2", "--json"}
	whole := trained(t, append(args, "--backend=inproc")...)
	for _, each := range []struct {
		backend string
		signal  syscall.Signal
		code    int
	}{{"inproc", syscall.SIGTERM, 0}, {"inproc", syscall.SIGUSR1, 0}, {"gloo", syscall.SIGTERM, exitFailed}} {
		directory := filepath.Join(t.TempDir(), "run")
		messages, code := toldToEnd(t, each.signal, append(args, "--backend="+each.backend, "--save="+directory)...)
		if code != each.code || !strings.Contains(messages, "told to end: saved after step ") {
			t.Errorf("%v: %d, %s", each, code, messages)
			continue
		}
		rest := trained(t, append(args, "--backend=inproc", "--resume="+directory)...)
		if math.Abs(rest.LastLoss-whole.LastLoss) > 1e-5*whole.LastLoss || !(rest.FirstLoss < whole.FirstLoss) {
			t.Errorf("%v: %+v, wanted %+v", each, rest, whole)
		}
	}
}

// toldToEnd is what a run wrote that gets a signal during its first steps, and how it ended.
func toldToEnd(t *testing.T, signal os.Signal, args ...string) (messages string, code int) {
	t.Helper()
	p := exec.Command(os.Args[0], args...)
	p.Env = append(os.Environ(), asProgram+"=1", "OMP_NUM_THREADS=1")
	pipe, err := p.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	lines, told := bufio.NewScanner(pipe), false
	for lines.Scan() {
		messages += lines.Text() + "\n"
		if !told && strings.Contains(lines.Text(), "step ") {
			told = true
			if err := p.Process.Signal(signal); err != nil {
				t.Error(err)
			}
		}
	}
	if err := p.Wait(); err != nil && p.ProcessState == nil {
		t.Fatal(err)
	}
	return messages, p.ProcessState.ExitCode()
}

func TestWhatIsWrong(t *testing.T) {
	data := text(t)
	bad := func(config string) string {
		return "--model=" + checkpoint(t, config, shapesOf(6, false, true), "F32", 1)
	}
	empty := t.TempDir()
	if err := os.WriteFile(filepath.Join(empty, "config.json"), []byte(config24+`"rope_theta": 500.0}`), 0o600); err != nil {
		t.Fatal(err)
	}
	cut := plain(t)
	file := filepath.Join(cut, "model-00001-of-00001.safetensors")
	if err := os.Truncate(file, 20000); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		arg, words string
		code       int
	}{
		"a mesh":            {"--mesh=pp=2", "wanted dp=2,tp=2", exitUsage},
		"a size":            {"--mesh=dp=0", "wanted dp=2,tp=2", exitUsage},
		"more":              {"--mesh=dp=2,tp=2,x=2", "wanted dp=2,tp=2", exitUsage},
		"steps":             {"--steps=0", "--steps=0", exitUsage},
		"a rate":            {"--lr=NaN", "--lr=NaN", exitUsage},
		"saves of none":     {"--save_every=2", "wanted --save, too", exitUsage},
		"no run":            {"--resume=/dev/null/run", "State.Load: ", exitFailed},
		"no place":          {"--save=/dev/null/run", "Checkpointer.Open: ", exitFailed},
		"a backend":         {"--backend=nccl", "--backend=nccl: wanted inproc or gloo", exitUsage},
		"no flag":           {"more", "'more': wanted flags only", exitUsage},
		"an unknown flag":   {"--nonsense", "nonsense", exitUsage},
		"no text":           {"--data=/nonexistent", "--data: ", exitFailed},
		"a long sequence":   {"--seq=500", "bytes; wanted more", exitFailed},
		"many positions":    {"--seq=100", "", 0},
		"no folder":         {"--model=/nonexistent", "/nonexistent/config.json", exitFailed},
		"no files":          {"--model=" + empty, "there are no *.safetensors", exitFailed},
		"a file cut off":    {"--model=" + cut, "the file at 20000", exitFailed},
		"another model":     {bad(`{"model_type": "gpt2"}`), "model_type is 'gpt2'; wanted llama", exitFailed},
		"no JSON":           {bad(`{`), "config.json: unexpected end", exitFailed},
		"no sizes":          {bad(`{"model_type": "llama"}`), "wanted vocab_size", exitFailed},
		"an activation":     {bad(`{"model_type": "llama", "hidden_act": "gelu"}`), "hidden_act is 'gelu'", exitFailed},
		"another shape":     {bad(strings.Replace(config24, `"intermediate_size": 40`, `"intermediate_size": 48`, 1) + `"rope_theta": 500.0}`), "is [40 24] in the file, and [48 24] in the module", exitFailed},
		"another depth":     {bad(strings.Replace(config24, `"num_hidden_layers": 2`, `"num_hidden_layers": 3`, 1) + `"rope_theta": 500.0}`), "no file has 'model.layers.2.", exitFailed},
		"less depth":        {bad(strings.Replace(config24, `"num_hidden_layers": 2`, `"num_hidden_layers": 1`, 1) + `"rope_theta": 500.0}`), "the module has no 'model.layers.1.", exitFailed},
		"heads":             {bad(strings.Replace(config24, `"num_key_value_heads": 2`, `"num_key_value_heads": 3`, 1) + `"rope_theta": 500.0}`), "llama.Model.Layers[0].SelfAttn.QProj.Weight", exitFailed},
		"a scaling":         {bad(config24 + `"rope_scaling": {"rope_type": "yarn"}}`), "there is no scaling 'yarn'", exitFailed},
		"too few positions": {bad(strings.Replace(config24, `"max_position_embeddings": 64`, `"max_position_embeddings": 4`, 1) + `"rope_theta": 500.0}`), "positions at most", exitFailed},
	} {
		_, messages, code := program(t, "--data="+data, "--mesh=dp=1,tp=2", "--backend=inproc", "--steps=1", "--batch=2", "--seq=8", c.arg)
		if code != c.code || !strings.Contains(messages, c.words) || strings.Contains(messages, "panic") {
			t.Errorf("%s: %d, %s", what, code, messages)
		}
	}
}
