// Package shardweave trains sharded models on LibTorch from Go.
//
// Four ranks, each a goroutine, multiply a tensor that lies on a mesh, and differentiate:
//
//	err := shardweave.RunRanks(ctx, 4, func(w *shardweave.World) error {
//		mesh, err := w.Mesh(shardweave.Dim("dp", 2), shardweave.Dim("tp", 2))
//		if err != nil {
//			return err
//		}
//		x := shardweave.Randn(mesh, []int64{8, 6}, shardweave.On{"dp": "S(0)"}, shardweave.RequiresGrad)
//		return x.Mul(x).Sum().Backward() // x.Grad() is 2 x
//	})
//
// # Models
//
// A model is a struct of tensors and of layers (package nn has them ready made) that embeds *[Module];
// [World.ModuleOf] registers what is in it by the names of its fields, [Module.Distribute] shards that by a
// [Plan]. Models and layers of the library are made by their kinds, [World.ModuleByKind], with the same names
// and plans ([Mesh.ZooPlan]).
//
// # Errors
//
// A function that makes a tensor returns just the tensor, so that expressions can be written. If it
// fails, the tensor carries the error, and so does all that is computed from it: [Tensor.Err] tells
// it, and whatever returns an error (Backward, Item, Data, Step) returns it. Errors of the library are
// *[Error]; a [Code] is a target for errors.Is:
//
//	if errors.Is(err, shardweave.DeadlineExceeded) { ... }
//
// Where a context has ended a call, errors.Is is also true of the context's error, context.DeadlineExceeded with
// DeadlineExceeded and context.Canceled with [Canceled], and the message begins with it.
//
// What was closed, is nil, or belongs to another rank is an error, wherever it is used. Functions of the program
// join in by [Failed].
//
// # Memory
//
// A tensor ends by [Tensor.Close]; or with the [World.Scope] in which it was made, which is what a training
// loop uses: one scope per step; or with its world. A tensor outside of any scope that nothing refers to
// any more is closed too, some time after a garbage collection, at its rank's next call. The collector does
// not see what tensors hold; so the rank has garbage collected when its tensors outside of scopes hold
// twice what was left the last time. Meshes, modules, optimizers, communicators, traces, GradSyncs and
// TokenLoaders end by their Close, or with their world. Operators, layouts, plans and token files belong to no
// rank; the garbage collector ends them.
//
// All these are used by pointer. A copy, which go vet reports, means the same thing.
//
// # Goroutines
//
// A rank (a world and all that is made from it) may be driven from any goroutine, by one at a time; who
// calls while another one is in a call gets FailedPrecondition. Only what is deferred, [DeferredInit], is a goroutine's
// and not a rank's. Different ranks run in parallel. Operators,
// layouts and plans may be used by several at once, as may [World.Abort], [Comm.Abort] and
// [World.FlightRecord]. Operators on sharded tensors communicate: all ranks call them in the same order.
// They follow the context that the world was made with; the collectives of a [Comm] also one of their own.
//
// Ranks are goroutines ([RunRanks]), processes that the program starts ([Spawn]), or processes that a
// launcher has started ([FromEnvironment]).
package shardweave
