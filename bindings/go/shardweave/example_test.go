package shardweave_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Four ranks multiply two tensors that lie on a mesh, and differentiate.
func Example() {
	err := sw.RunRanks(context.Background(), 4, func(w *sw.World) error {
		mesh, err := w.Mesh(sw.Dim("dp", 2), sw.Dim("tp", 2))
		if err != nil {
			return err
		}
		x := sw.Full(mesh, []int64{8, 6}, 3, sw.On{"dp": "S(0)", "tp": "S(1)"}, sw.RequiresGrad)
		if err := x.Mul(x).Sum().Backward(); err != nil {
			return err
		}
		grad, err := x.Grad() // 2 x
		if err != nil {
			return err
		}
		sum, err := grad.Sum().Item()
		if err != nil {
			return err
		}
		if w.Rank() == 0 {
			fmt.Println(x)
			fmt.Println("the gradient's sum is", sum)
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// DTensor[8, 6] Float [S(0), S(1)] on DeviceMesh(dp=2, tp=2), local [4, 3] at [0, 0]
	// the gradient's sum is 288
}

func ExampleModule() {
	err := sw.RunRanks(context.Background(), 2, func(w *sw.World) error {
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		weight := module.Parameter("weight", sw.Ones(w, []int64{1, 4}))

		mesh, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		plan, err := sw.ParsePlan(`{"parameter": {"weight": {"tp": "S(1)"}}}`)
		if err != nil {
			return err
		}
		if err := module.Distribute(mesh, plan, sw.SameEverywhere); err != nil {
			return err
		}
		optimizer, err := sw.NewSGD([]*sw.Tensor{weight}, 0.1)
		if err != nil {
			return err
		}
		for step := 0; step < 3; step++ {
			err := w.Scope(func() error { // its tensors end with it
				x := sw.Ones(mesh, []int64{5, 4})
				y := x.Linear(weight, nil).Sub(1)
				loss := y.Mul(y).Mean()
				if err := loss.Backward(); err != nil {
					return err
				}
				if err := module.FinishGradSync(); err != nil {
					return err
				}
				if err := optimizer.Step(); err != nil {
					return err
				}
				if err := optimizer.ZeroGrad(); err != nil {
					return err
				}
				value, err := loss.Item()
				if w.Rank() == 0 {
					fmt.Printf("loss %.2f\n", value)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// loss 9.00
	// loss 0.36
	// loss 0.01
}

// A weight that ranks keep parts of is read as a whole.
func ExampleModule_FullParams() {
	err := sw.RunRanks(context.Background(), 2, func(w *sw.World) error {
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		module.Parameter("weight", sw.Full(w, []int64{3, 4}, 0.5))
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		if _, err := module.FullyShard(mesh, sw.SameEverywhere); err != nil {
			return err
		}
		return module.FullParams(false, func(whole sw.FullParams) error { // on all ranks
			weight, err := whole.Get("weight") // plain, until this function ends
			if err != nil {
				return err
			}
			sizes, err := weight.Sizes()
			if err != nil {
				return err
			}
			sum, err := weight.Detach().Sum().Item() // no gradients are recorded of what is whole
			if err == nil && w.Rank() == 0 {
				fmt.Println("weight is", sizes, "and sums up to", sum)
			}
			return err
		})
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// weight is [3 4] and sums up to 6
}

// A block without a weight of its own, sequence parallel: outside of it every rank has a part of the tokens.
func ExampleForward_Run() {
	err := sw.RunRanks(context.Background(), 2, func(w *sw.World) error {
		model, err := w.NewModule()
		if err != nil {
			return err
		}
		up := model.Parameter("block.up.weight", sw.Ones(w, []int64{8, 3}))
		down := model.Parameter("block.down.weight", sw.Ones(w, []int64{3, 8}))
		forward, err := model.Forward("block")
		if err != nil {
			return err
		}
		block := func(x *sw.Tensor) *sw.Tensor {
			return forward.Run(func(in []*sw.Tensor) *sw.Tensor {
				return in[0].Linear(up, nil).Relu().Linear(down, nil)
			}, x)
		}

		mesh, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		plan := sw.NewPlan().Add("*.up.weight", sw.On{"tp": "S(0)"}).Add("*.down.weight", sw.On{"tp": "S(1)"}).
			AddForward("block.input", sw.On{"tp": "R"}).AddForward("block.output", sw.On{"tp": "S(0)"})
		if err := model.Distribute(mesh, plan, sw.SameEverywhere); err != nil {
			return err
		}
		y := block(sw.Ones(mesh, []int64{5, 3}, sw.On{"tp": "S(0)"}))
		layout, err := y.Layout()
		if err != nil {
			return err
		}
		sum, err := y.Sum().Item()
		if err == nil && w.Rank() == 0 {
			fmt.Println(layout, sum)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// [S(0)] 360
}

func ExampleOp_Call() {
	w, err := sw.Alone()
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	topk, err := sw.FindOp("aten::topk") // slow; calling is not
	if err != nil {
		log.Fatal(err)
	}
	x := sw.FromSlice(w, []float32{3, 1, 2}, []int64{3})
	results, err := topk.Call(w, x, 2)
	if err != nil {
		log.Fatal(err)
	}
	values, err := sw.Data[float32](results[0].(*sw.Tensor))
	fmt.Println(values, err)

	_, err = sw.FindOp("aten::topc")
	fmt.Println(errors.Is(err, sw.NotFound))
	// Output:
	// [3 2] <nil>
	// true
}

func ExampleAllReduce() {
	ctx := context.Background()
	err := sw.RunRanks(ctx, 3, func(w *sw.World) error {
		sum := []int64{int64(w.Rank())}
		if err := sw.AllReduce(ctx, w.Comm(), sum, sum, sw.Sum); err != nil {
			return err
		}
		if w.Rank() == 0 {
			fmt.Println(sum)
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: [3]
}

func ExampleLayout_LocalExtent() {
	layout := sw.MustParseLayout("[S(0), R]")
	shape, offset, err := layout.LocalExtent([]int64{2, 2}, []int64{1, 0}, []int64{7, 5})
	fmt.Println(shape, offset, err)
	// Output: [3 5] [4 0] <nil>
}

func ExampleTensor_Err() {
	w, err := sw.Alone()
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	x, y := sw.Ones(w, []int64{2, 3}), sw.Ones(w, []int64{4})
	z := x.Add(y).Mul(2).Sum() // expressions carry errors along
	fmt.Println(errors.Is(z.Err(), sw.InvalidArgument))
	_, err = z.Item()
	fmt.Println(err == z.Err())
	// Output:
	// true
	// true
}
