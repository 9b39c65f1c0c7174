package nn

import (
	"fmt"
	"math"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Init writes first values over a tensor: one of this package's, or the program's own. Nothing is recorded for gradients.
// It is also what [WeightInit] takes. An error is that of the tensor.
type Init func(t *sw.Tensor) error

// inPlace calls operators that write to the tensor, without a record for gradients.
func inPlace(t *sw.Tensor, f func(t *sw.Tensor) error) error {
	target := t.Detach()
	defer target.Close()
	return f(target)
}

// apply calls an operator that writes to the tensor.
func apply(t *sw.Tensor, op string, args ...any) error {
	same := t.Apply(op, args...)
	defer same.Close()
	return same.Err()
}

func drawn(op string, args ...any) Init {
	return func(t *sw.Tensor) error {
		return inPlace(t, func(t *sw.Tensor) error { return apply(t, op, args...) })
	}
}

// Constant is the same number everywhere.
func Constant(value float64) Init { return drawn("aten::fill_.Scalar", value) }

// Zeros is 0 everywhere.
func Zeros(t *sw.Tensor) error { return Constant(0)(t) }

// Ones is 1 everywhere.
func Ones(t *sw.Tensor) error { return Constant(1)(t) }

// Normal draws from the normal distribution.
func Normal(mean, std float64) Init { return drawn("aten::normal_", mean, std) }

// Uniform draws from [low, high).
func Uniform(low, high float64) Init { return drawn("aten::uniform_", low, high) }

// TruncNormal draws from the normal distribution between low and high: trunc_normal_ of torch.nn.init.
func TruncNormal(mean, std, low, high float64) Init {
	return func(t *sw.Tensor) error {
		below := func(x float64) float64 { return (1 + math.Erf((x-mean)/std/math.Sqrt2)) / 2 }
		if !(std > 0) || !(low < high) {
			return fmt.Errorf("nn.TruncNormal: std is %v, low %v, high %v; wanted a std above 0, and low below high", std, low, high)
		}
		return inPlace(t, func(t *sw.Tensor) error {
			for _, step := range []struct {
				op   string
				args []any
			}{
				{"aten::uniform_", []any{2*below(low) - 1, 2*below(high) - 1}},
				{"aten::erfinv_", nil},
				{"aten::mul_.Scalar", []any{std * math.Sqrt2}},
				{"aten::add_.Scalar", []any{mean}},
				{"aten::clamp_", []any{low, high}},
			} {
				if err := apply(t, step.op, step.args...); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// XavierUniform draws from [-b, b), b = gain sqrt(6 / (in + out)).
func XavierUniform(gain float64) Init {
	return byFans(func(in, out float64) Init {
		bound := gain * math.Sqrt(6/(in+out))
		return Uniform(-bound, bound)
	})
}

// XavierNormal draws from the normal distribution with std = gain sqrt(2 / (in + out)).
func XavierNormal(gain float64) Init {
	return byFans(func(in, out float64) Init { return Normal(0, gain*math.Sqrt(2/(in+out))) })
}

// KaimingUniform draws from [-b, b), b = gain sqrt(3 / in); gain is sqrt(2) for layers before a ReLU.
func KaimingUniform(gain float64) Init {
	return byFans(func(in, _ float64) Init {
		bound := gain * math.Sqrt(3/in)
		return Uniform(-bound, bound)
	})
}

// KaimingNormal draws from the normal distribution with std = gain / sqrt(in); gain is sqrt(2) for layers before a ReLU.
func KaimingNormal(gain float64) Init {
	return byFans(func(in, _ float64) Init { return Normal(0, gain/math.Sqrt(in)) })
}

// byFans is for weights [out, in, ...]: of how many inputs an output is computed, and how many outputs an input has.
func byFans(of func(in, out float64) Init) Init {
	return func(t *sw.Tensor) error {
		sizes, err := t.Sizes()
		if err != nil {
			return err
		}
		if len(sizes) < 2 {
			return fmt.Errorf("nn: a tensor of sizes %v has no inputs and outputs; wanted two dimensions or more", sizes)
		}
		field := 1.0
		for _, size := range sizes[2:] {
			field *= float64(size)
		}
		return of(math.Max(1, float64(sizes[1])*field), math.Max(1, float64(sizes[0])*field))(t)
	}
}
