package shardweave_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// counted is 0, 1, 2, ... in these sizes, plain or (on a mesh) cut.
func counted(w *sw.World, sizes ...int64) *sw.Tensor {
	n := int64(1)
	for _, size := range sizes {
		n *= size
	}
	all := make([]float64, n)
	for i := range all {
		all[i] = float64(i)
	}
	return sw.FromSlice(w, all, sizes)
}

func TestIndex(t *testing.T) {
	rows := func(w *sw.World, m *sw.Mesh) (*sw.Tensor, *sw.Tensor) {
		at, mask := sw.FromSlice(w, []int64{2, 0, 2}, []int64{3}), sw.FromSlice(w, []bool{true, false, true, false, false, true}, []int64{3, 2})
		if m != nil {
			at, mask = at.Distribute(m, nil, sw.SameEverywhere), mask.Distribute(m, nil, sw.SameEverywhere)
		}
		return at, mask
	}
	check := func(w *sw.World, m *sw.Mesh, spec sw.On) error {
		x := counted(w, 3, 2, 4)
		if m != nil {
			x = x.Distribute(m, spec, sw.SameEverywhere)
		}
		at, mask := rows(w, m)
		cases := map[string]struct {
			index []any
			sizes []int64
			want  []float64
		}{
			"x[1]":               {[]any{1}, []int64{2, 4}, []float64{8, 9, 10, 11, 12, 13, 14, 15}},
			"x[-1, 0]":           {[]any{int64(-1), 0}, []int64{4}, []float64{16, 17, 18, 19}},
			"x[0, :, 1:3]":       {[]any{0, sw.All, sw.Range(1, 3)}, []int64{2, 2}, []float64{1, 2, 5, 6}},
			"x[..., -1]":         {[]any{sw.Rest, -1}, []int64{3, 2}, []float64{3, 7, 11, 15, 19, 23}},
			"x[1::2, 1, ::3]":    {[]any{sw.From(1).Step(2), 1, sw.All.Step(3)}, []int64{1, 2}, []float64{12, 15}},
			"x[:-2, 0, -2:]":     {[]any{sw.To(-2), 0, sw.From(-2)}, []int64{1, 2}, []float64{2, 3}},
			"x[5:9]":             {[]any{sw.Range(5, 9)}, []int64{0, 2, 4}, []float64{}},
			"x[0, None, ..., 0]": {[]any{0, sw.NewDim, sw.Rest, 0}, []int64{1, 2}, []float64{0, 4}},
			"x[at, 0, 0]":        {[]any{at, 0, 0}, []int64{3}, []float64{16, 0, 16}},
			"x[:, 1, at]":        {[]any{sw.All, 1, at}, []int64{3, 3}, []float64{6, 4, 6, 14, 12, 14, 22, 20, 22}},
			"x[mask, :2]":        {[]any{mask, sw.To(2)}, []int64{3, 2}, []float64{0, 1, 8, 9, 20, 21}},
			"x[mask, 3]":         {[]any{mask, 3}, []int64{3}, []float64{3, 11, 23}},
		}
		for _, what := range sortedKeys(cases) { // all ranks in one order
			c := cases[what]
			y := x.Index(c.index...)
			sizes, err := y.Sizes()
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			got, err := whole(y)
			if err != nil || !reflect.DeepEqual(got, c.want) || !reflect.DeepEqual(sizes, c.sizes) {
				return fmt.Errorf("%s is %v %v, %v; wanted %v %v", what, sizes, got, err, c.sizes, c.want)
			}
		}
		return nil
	}
	if err := check(alone(t), nil, nil); err != nil {
		t.Error(err)
	}
	for _, spec := range []sw.On{{}, {"x": "S(0)"}, {"x": "S(2)"}, {"x": "S(0)", "y": "S(1)"}} {
		run(t, 4, func(w *sw.World) error {
			m, err := w.ParseMesh("x=2,y=2")
			if err != nil {
				return err
			}
			if err := check(w, m, spec); err != nil {
				return fmt.Errorf("%v: %w", spec, err)
			}
			return nil
		})
	}
	// Gradients.
	w := alone(t)
	x := sw.Ones(w, []int64{3, 2}, sw.RequiresGrad)
	if err := x.Index(sw.From(1), 0).Mul(3).Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	if got := mustOf(sw.Data[float32](mustOf(x.Grad()))); !reflect.DeepEqual(got, []float32{0, 0, 3, 0, 3, 0}) {
		t.Error(got)
	}
	for what, c := range map[string]struct {
		got   *sw.Tensor
		code  sw.Code
		words string
	}{
		"too many":    {x.Index(0, 0, 0), sw.OutOfRange, "indices of 3 dimensions, and the tensor has 2"},
		"too large":   {x.Index(3), sw.OutOfRange, "Tensor.Index: "},
		"a string":    {x.Index("0"), sw.InvalidArgument, "argument 'at[0]' has the type string"},
		"two rests":   {x.Index(sw.Rest, sw.Rest), sw.InvalidArgument, "Rest more than once"},
		"no step":     {x.Index(sw.All.Step(0)), sw.InvalidArgument, "Tensor.Index: "},
		"nil":         {x.Index((*sw.Tensor)(nil)), sw.InvalidArgument, "nil"},
		"a scalar's":  {sw.Scalar(w, 1.5).Index(0), sw.OutOfRange, "the tensor has 0"},
		"another's":   {x.Index(sw.Scalar(alone(t), int64(0))), sw.InvalidArgument, "several ranks"},
		"floats":      {x.Index(sw.Ones(w, []int64{1})), sw.Unknown, "Tensor.Index: "},
		"of a failed": {sw.Failed(sw.Aborted).Index(0), sw.Aborted, ""},
	} {
		err := c.got.Err()
		if err == nil || c.code != sw.Unknown && !errors.Is(err, c.code) && what != "too large" && what != "no step" || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestSetIndexAndAssign(t *testing.T) {
	w := alone(t)
	x := sw.Zeros(w, []int64{2, 3}, sw.RequiresGrad)
	at := sw.FromSlice(w, []int64{2, 0}, []int64{2})
	for _, err := range []error{
		x.SetIndex(1.5, 0, 1), x.SetIndex(sw.FromSlice(w, []int64{7, 8}, []int64{2}), 1, sw.To(2)),
		x.SetIndex(true, 0, sw.FromSlice(w, []bool{true, false, false}, []int64{3})), x.SetIndex(9, sw.All, sw.From(2)),
		x.SetIndex(sw.FromSlice(w, []float64{3, 4}, []int64{2}), 0, at),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if got := mustOf(sw.Data[float32](x)); !reflect.DeepEqual(got, []float32{4, 1.5, 3, 7, 8, 9}) {
		t.Error(got)
	}
	if leaf, err := x.IsLeaf(); err != nil || !leaf {
		t.Error(leaf, err)
	}
	if err := x.Assign(sw.FromSlice(w, []int64{1, 2, 3}, []int64{3})); err != nil {
		t.Error(err)
	}
	if got := mustOf(sw.Data[float32](x)); !reflect.DeepEqual(got, []float32{1, 2, 3, 1, 2, 3}) {
		t.Error(got)
	}
	big := sw.Zeros(w, []int64{1}, sw.I64)
	if err := big.Assign(int64(math.MaxInt64)); err != nil || mustOf(sw.Data[int64](big))[0] != math.MaxInt64 {
		t.Error(err)
	}
	for what, err := range map[string]error{
		"other sizes": x.Assign(sw.Ones(w, []int64{2})),
		"nil":         x.Assign((*sw.Tensor)(nil)),
		"text":        x.Assign("x"),
		"no index":    x.SetIndex(1, 5),
		"a string":    x.SetIndex(1, "0"),
		"a value":     x.SetIndex(struct{}{}, 0),
	} {
		if err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Zeros(m, []int64{3}, sw.On{"x": "S(0)"})
		if err := x.SetIndex(1, 0); !errors.Is(err, sw.Unimplemented) {
			return fmt.Errorf("%v", err)
		}
		if err := x.Assign(sw.FromSlice(w, []float32{1, 2, 3}, []int64{3}).Distribute(m, nil, sw.SameEverywhere)); err != nil {
			return err
		}
		got, err := sw.DataAs[float64](x.Full())
		if err != nil || !reflect.DeepEqual(got, []float64{1, 2, 3}) {
			return fmt.Errorf("%v, %v", got, err)
		}
		return nil
	})
}

func TestNumbersOfEveryKind(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []int64{1, 2, 3}, []int64{3})
	for _, number := range []any{2, int8(2), int16(2), int32(2), int64(2), uint8(2), uint16(2), uint32(2), uint(2), uint64(2), true} {
		y := x.Mul(number)
		want := []int64{2, 4, 6}
		if number == true {
			want = []int64{1, 2, 3}
		}
		if d, err := y.DType(); err != nil || d != sw.I64 {
			t.Errorf("%T: %v, %v", number, d, err)
		}
		got, err := sw.Data[int64](y)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%T: %v, %v", number, got, err)
		}
	}
	for _, number := range []any{1.5, float32(1.5), sw.Float16Of(1.5), sw.BFloat16Of(1.5)} {
		if got, err := sw.DataAs[float64](x.Add(number)); err != nil || !reflect.DeepEqual(got, []float64{2.5, 3.5, 4.5}) {
			t.Errorf("%T: %v, %v", number, got, err)
		}
	}
	if err := x.Add(uint64(math.MaxUint64)).Err(); !errors.Is(err, sw.OutOfRange) {
		t.Error(err)
	}
	if got, err := sw.Data[bool](x.Ge(2).And(x.Le(2)).Or(x.Ne(x).Not().Not())); err != nil || !reflect.DeepEqual(got, []bool{false, true, false}) {
		t.Error(got, err)
	}
	if got := mustOf(sw.Data[int64](x.Remainder(2))); !reflect.DeepEqual(got, []int64{1, 0, 1}) {
		t.Error(got)
	}
}

func TestHalves(t *testing.T) {
	w := alone(t)
	for _, d := range []sw.DType{sw.F16, sw.BF16, sw.F64, sw.F32} {
		x := sw.FromSlice(w, []float32{1.5, -2, 0.25}, []int64{3}, d, sw.RequiresGrad)
		got, err := sw.DataAs[float32](x)
		if is, wrong := x.DType(); err != nil || wrong != nil || is != d || !reflect.DeepEqual(got, []float32{1.5, -2, 0.25}) {
			t.Error(d, is, got, err)
		}
		if requires, err := x.RequiresGrad(); err != nil || !requires {
			t.Error(d, requires, err)
		}
		if leaf, err := x.IsLeaf(); err != nil || !leaf {
			t.Error(d, leaf, err)
		}
	}
	if got := mustOf(sw.DataAs[float32](sw.FromSlice(w, []float32{1.0001}, []int64{1}, sw.BF16))); got[0] != 1 {
		t.Error(got)
	}
	if got := mustOf(sw.DataAs[int64](sw.FromSlice(w, []bool{true, false}, []int64{2}))); !reflect.DeepEqual(got, []int64{1, 0}) {
		t.Error(got)
	}
	for what, err := range map[string]error{
		"integers of floats": second(sw.DataAs[int64](sw.Ones(w, nil))),
		"integers of U64":    second(sw.DataAs[int64](sw.Ones(w, nil, sw.U64))),
		"complex":            second(sw.DataAs[float64](sw.Ones(w, nil, sw.C64))),
		"to integers":        sw.FromSlice(w, []float32{1.5}, nil, sw.I64).Err(),
		"from integers":      sw.FromSlice(w, []int64{1}, nil, sw.F32).Err(),
		"sharded":            second(sw.DataAs[float64](sw.Ones(mustOf(w.ParseMesh("x=1")), nil))),
	} {
		if !errors.Is(err, sw.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Methods that the table generates, and those beside it: what they are, on one rank and cut.
func TestMoreOperators(t *testing.T) {
	values := []float64{-1.5, 0.25, 2, -0.5, 1, 0.75}
	check := func(x *sw.Tensor) error {
		each := func(f func(float64) float64) []float64 {
			all := make([]float64, len(values))
			for i, v := range values {
				all[i] = f(v)
			}
			return all
		}
		top, where := x.TopK(1, 1)
		sorted, _ := x.Sort(1, false)
		parts, err := x.Split([]int64{1, 2}, 1)
		if err != nil {
			return err
		}
		cases := map[string]struct {
			got  *sw.Tensor
			want []float64
		}{
			"floor":      {x.Floor(), each(math.Floor)},
			"ceil":       {x.Ceil(), each(math.Ceil)},
			"round":      {x.Round(), each(math.RoundToEven)},
			"trunc":      {x.Trunc(), each(math.Trunc)},
			"sin":        {x.Sin(), each(math.Sin)},
			"cos":        {x.Cos(), each(math.Cos)},
			"erf":        {x.Erf(), each(math.Erf)},
			"expm1":      {x.Expm1(), each(math.Expm1)},
			"square":     {x.Square(), each(func(v float64) float64 { return v * v })},
			"reciprocal": {x.Reciprocal(), each(func(v float64) float64 { return 1 / v })},
			"softplus":   {x.Softplus(), each(func(v float64) float64 { return math.Log1p(math.Exp(v)) })},
			"leaky":      {x.LeakyRelu(0.1), each(func(v float64) float64 { return math.Max(v, 0.1*v) })},
			"elu":        {x.Elu(2), each(func(v float64) float64 { return math.Max(v, 0) + math.Min(0, 2*math.Expm1(v)) })},
			"maximum":    {x.Maximum(x.Neg()), each(math.Abs)},
			"minimum":    {x.Minimum(x.Neg()), each(func(v float64) float64 { return -math.Abs(v) })},
			"sign":       {x.Sign(), []float64{-1, 1, 1, -1, 1, 1}},
			"tril":       {x.Tril(0), []float64{-1.5, 0, 0, -0.5, 1, 0}},
			"triu":       {x.Triu(1), []float64{0, 0.25, 2, 0, 0, 0.75}},
			"flip":       {x.Flip(1), []float64{2, 0.25, -1.5, 0.75, 1, -0.5}},
			"roll":       {x.Roll([]int64{1}, []int{1}), []float64{2, -1.5, 0.25, 0.75, -0.5, 1}},
			"fill":       {x.MaskedFill(x.Lt(0), 7), []float64{7, 0.25, 2, 7, 1, 0.75}},
			"repeat":     {x.Repeat(1, 2), []float64{-1.5, 0.25, 2, -1.5, 0.25, 2, -0.5, 1, 0.75, -0.5, 1, 0.75}},
			"interleave": {x.RepeatInterleave(2, 0), []float64{-1.5, 0.25, 2, -1.5, 0.25, 2, -0.5, 1, 0.75, -0.5, 1, 0.75}},
			"unflatten":  {x.Unflatten(1, []int64{3, 1}), values},
			"logsumexp":  {x.LogSumExp(0), []float64{math.Log(math.Exp(-1.5) + math.Exp(-0.5)), math.Log(math.Exp(0.25) + math.E), math.Log(math.Exp(2) + math.Exp(0.75))}},
			"lerp":       {x.Lerp(x.Neg(), 0.5), each(func(float64) float64 { return 0 })},
			"rms":        {x.RMSNorm([]int64{3}, nil, 0).Square().Mean(1), []float64{1, 1}},
			"min":        {x.Min(1), []float64{-1.5, -0.5}},
			"max":        {x.Max(0), []float64{-0.5, 1, 2}},
			"norm":       {x.Norm(), []float64{math.Sqrt(1.5*1.5 + 0.25*0.25 + 4 + 0.25 + 1 + 0.75*0.75)}},
			"norms":      {x.Norm(0), []float64{math.Sqrt(2.5), math.Sqrt(1.0625), math.Sqrt(4.5625)}},
			"var":        {x.Var(0), []float64{0.5, 0.28125, 0.78125}},
			"std":        {x.Std(0), []float64{math.Sqrt(0.5), 0.75 / math.Sqrt2, 1.25 / math.Sqrt2}},
			"prod":       {x.Prod(), []float64{-1.5 * 0.25 * 2 * -0.5 * 0.75}},
			"topk":       {top, []float64{2, 1}},
			"where":      {where.To(sw.F64), []float64{2, 1}},
			"sort":       {sorted, []float64{-1.5, 0.25, 2, -0.5, 0.75, 1}},
			"split":      {parts[0], []float64{-1.5, -0.5}},
			"rest":       {parts[1], []float64{0.25, 2, 1, 0.75}},
			"any":        {x.Lt(-1).Any(1).To(sw.F64), []float64{1, 0}},
			"all":        {x.Gt(-1).All(1).To(sw.F64), []float64{0, 1}},
			"argmin":     {x.ArgMin(1).To(sw.F64), []float64{0, 0}},
			"l1":         {x.L1Loss(x.Add(2)), []float64{2}},
			"gather":     {x.Gather(1, where), []float64{2, 1}},
		}
		for _, what := range sortedKeys(cases) { // all ranks in one order
			c := cases[what]
			got, err := whole(c.got)
			if err != nil || !near(got, c.want) {
				return fmt.Errorf("%s: %v, %v; wanted %v", what, got, err, c.want)
			}
		}
		if _, err := x.Split([]int64{1, 1}, 1); err == nil {
			return errors.New("sizes that leave something out are no error")
		}
		return nil
	}
	w := alone(t)
	if err := check(sw.FromSlice(w, values, []int64{2, 3})); err != nil {
		t.Error(err)
	}
	for _, spec := range []sw.On{{"x": "S(0)"}, {"x": "S(1)"}, {}} {
		run(t, 3, func(w *sw.World) error {
			m, err := w.ParseMesh("x=3")
			if err != nil {
				return err
			}
			if err := check(sw.FromSlice(w, values, []int64{2, 3}).Distribute(m, spec, sw.SameEverywhere)); err != nil {
				return fmt.Errorf("%v: %w", spec, err)
			}
			return nil
		})
	}
}

func TestSchedules(t *testing.T) {
	// What transformers' get_cosine_schedule_with_warmup(2, 6), get_linear_schedule_with_warmup(2, 6) and torch's
	// StepLR(2, 0.1) say.
	for what, c := range map[string]struct {
		got  sw.Schedule
		want []float64
	}{
		"cosine":    {sw.CosineSchedule(2, 6, 0), []float64{0, 0.5, 1, 0.5 + 0.5*math.Sqrt(0.5), 0.5, 0.5 - 0.5*math.Sqrt(0.5), 0, 0}},
		"a least":   {sw.CosineSchedule(2, 6, 0.2), []float64{0, 0.5, 1, 0.6 + 0.4*math.Sqrt(0.5), 0.6, 0.6 - 0.4*math.Sqrt(0.5), 0.2, 0.2}},
		"linear":    {sw.LinearSchedule(2, 6, 0), []float64{0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0}},
		"no warmup": {sw.LinearSchedule(0, 4, 0.5), []float64{1, 0.875, 0.75, 0.625, 0.5}},
		"no fall":   {sw.LinearSchedule(2, 2, 0), []float64{0, 0.5, 0, 0}},
		// get_wsd_schedule(2 of warm-up, 4 of decay, 8 in all) with decay_type "linear".
		"wsd":       {sw.WSDSchedule(2, 8, 4, 0), []float64{0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0}},
		"wsd floor": {sw.WSDSchedule(2, 8, 4, 0.2), []float64{0, 0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2}},
		"long wsd":  {sw.WSDSchedule(2, 6, 9, 0), []float64{0, 0.5, 1, 0.75, 0.5, 0.25, 0}},
		"no decay":  {sw.WSDSchedule(0, 3, 0, 0), []float64{1, 1, 1, 0}},
		"steps":     {sw.StepSchedule(2, 0.1), []float64{1, 1, 0.1, 0.1, 0.01}},
	} {
		for step, want := range c.want {
			if got := c.got(int64(step)); math.Abs(got-want) > 1e-12 {
				t.Errorf("%s, step %d: %v, wanted %v", what, step, got, want)
			}
		}
	}
	w := alone(t)
	p := []*sw.Tensor{sw.Ones(w, []int64{1}, sw.RequiresGrad)}
	a, b := mustOf(sw.NewSGD(p, 0.5)), mustOf(sw.NewAdamW(p, 0.25, sw.WeightDecay(0)))
	s := mustOf(sw.NewScheduler(sw.LinearSchedule(1, 3, 0), a, b))
	for step, want := range []float64{0, 1, 0.5, 0} {
		if x, y := mustOf(a.LR()), mustOf(b.LR()); x != 0.5*want || y != 0.25*want || s.At() != int64(step) {
			t.Error(step, x, y, s.At())
		}
		if err := s.Step(); err != nil {
			t.Error(err)
		}
	}
	if err := s.SetStep(1); err != nil || mustOf(a.LR()) != 0.5 {
		t.Error(err)
	}
	if err := mustOf(sw.NewScheduler(sw.StepSchedule(1, 1), a)).SetStep(-1); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := sw.NewScheduler(func(int64) float64 { return math.NaN() }, a); !errors.Is(err, sw.OutOfRange) {
		t.Error(err)
	}
	// Groups with options of their own.
	q := []*sw.Tensor{sw.Ones(w, []int64{1}, sw.RequiresGrad)}
	all := sw.Optimizers{mustOf(sw.NewSGD(p, 1)), mustOf(sw.NewSGD(q, 0.1))}
	if err := p[0].Mul(q[0]).Backward(); err != nil {
		t.Fatal(err)
	}
	if err := sw.ClipGradValue(append(p, q...), 0.5); err != nil {
		t.Fatal(err)
	}
	if err := all.Step(); err != nil {
		t.Fatal(err)
	}
	if x, y := mustOf(p[0].Item()), mustOf(q[0].Item()); x != 0.5 || math.Abs(y-0.95) > 1e-7 {
		t.Error(x, y)
	}
	if err := all.ZeroGrad(); err != nil || mustOf(p[0].Grad()) != nil {
		t.Error(err)
	}
	if err := all.Close(); err != nil {
		t.Error(err)
	}
	if err := all.Step(); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
	if err := sw.ClipGradValue(p, math.NaN()); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

// Ranks that are goroutines draw the same numbers.
func TestSeeded(t *testing.T) {
	run(t, 4, func(w *sw.World) error {
		for round := 0; round < 5; round++ {
			var first, second []float32
			for _, to := range []*[]float32{&first, &second} {
				if err := sw.Seeded(5, func() (err error) {
					*to, err = sw.Data[float32](sw.Rand(w, []int64{50}))
					return err
				}); err != nil {
					return err
				}
			}
			if !reflect.DeepEqual(first, second) {
				return fmt.Errorf("%v and %v", first, second)
			}
		}
		return nil
	})
	if err := sw.Seeded(1, nil); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if err := sw.Seeded(1, func() error { return sw.Aborted }); !errors.Is(err, sw.Aborted) {
		t.Error(err)
	}
}

func TestFailed(t *testing.T) {
	if err := sw.Failed(nil).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	x := sw.Ones(alone(t), nil)
	if err := x.Add(sw.Failed(sw.DataLoss)).Sum().Err(); !errors.Is(err, sw.DataLoss) {
		t.Error(err)
	}
}
