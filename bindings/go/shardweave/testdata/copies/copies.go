// Package copies does what go vet has to refuse: TestVetFindsCopies.
package copies

import sw "github.com/shardweave/shardweave/bindings/go/shardweave"

func world(p *sw.World) { v := *p; _ = v.Size() }

func mesh(p *sw.Mesh) { v := *p; _ = v.String() }

func comm(p *sw.Comm) { v := *p; _ = v.Health() }

func trace(p *sw.Trace) { v := *p; _ = v.String() }

func forward(p *sw.Forward) { v := *p; _ = v.Close() }

func module(p *sw.Module) { v := *p; _ = v.Err() }

func gradSync(p *sw.GradSync) { v := *p; _ = v.Close() }

func optimizer(p *sw.Optimizer) { v := *p; _ = v.Step() }

func gradScaler(p *sw.GradScaler) { v := *p; _ = v.Close() }

func capturedStep(p *sw.CapturedStep) { v := *p; _ = v.Close() }

func scheduler(p *sw.Scheduler) { v := *p; _ = v.Step() }

func context(p *sw.FunctionContext) { v := *p; _ = v.Save() }

func tensor(p *sw.Tensor) { v := *p; _ = v.Err() }

func layout(p *sw.Layout) { v := *p; _ = v.String() }

func plan(p *sw.Plan) { v := *p; _, _ = v.MarshalJSON() }

func op(p *sw.Op) { v := *p; _, _ = v.Schema() }

func tokenLoader(p *sw.TokenLoader) { v := *p; _ = v.Close() }

func tokenFile(p *sw.TokenFile) { v := *p; _, _ = v.NumTokens() }

func state(p *sw.State) { v := *p; _ = v.Close() }

func checkpointer(p *sw.Checkpointer) { v := *p; _ = v.Close() }

func metricsWriter(p *sw.MetricsWriter) { v := *p; _ = v.Flush() }
