// Package nn has the layers that models are made of: structs of tensors, whose names, defaults and numbers are those of
// torch.nn, or of Hugging Face's transformers, so that their checkpoints fit.
//
//	type MLP struct {
//		*shardweave.Module
//		Up, Down *nn.Linear
//	}
//
//	m := &MLP{Up: nn.NewLinear(w, 64, 256), Down: nn.NewLinear(w, 256, 64)}
//	if _, err := w.ModuleOf(m); err != nil { // up.weight, up.bias, down.weight, down.bias
//		return err
//	}
//	y := m.Down.Forward(m.Up.Forward(x).Gelu())
//
// A layer is made of plain tensors (in a World) or of sharded ones (on a Mesh, replicated, drawn alike for any number of
// ranks). Plain ones are what [shardweave.Module.Distribute] shards; they are drawn from the process's generator:
// [shardweave.Seeded], or let rank 0's count.
//
// Layers that cannot be made have tensors that carry the error, which [shardweave.World.ModuleOf] tells, with the
// field's name; so does what Forward makes of them. Layers belong to the rank of their tensors, and may be driven from
// any goroutine, by one at a time.
package nn
