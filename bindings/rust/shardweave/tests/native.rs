//! What Rust's own means make easy: the derive macro, operators, indices, groups of optimizers.
#![cfg(feature = "derive")]

use std::cell::Cell;

use shardweave::{
    args, nn, AdamW, Bf16, Code, Complex, DType, Ellipsis, Error, IndexItem, Members, Module,
    NewAxis, Op, Placement::*, Result, Schedule, Sgd, Source, Tensor, TensorOptions, TensorResult,
    Training, World,
};

fn names(module: &impl Module) -> Vec<String> {
    module.parameters().into_iter().map(|(name, _)| name).collect()
}

fn ones(sizes: &[i64]) -> Tensor {
    Tensor::ones(sizes).unwrap()
}

#[derive(Module)]
struct Block<N> {
    norm: N,
    #[module(name = "c_attn")]
    attention: nn::Linear,
    gate: Option<nn::Linear>,
    scales: Vec<Tensor>,
    heads: i64,
    r#type: Option<Tensor>,
    training: Training,
}

#[derive(Module)]
enum Mlp {
    Dense(nn::Linear),
    Experts { router: Tensor, experts: [nn::Linear; 2] },
    Pair(Tensor, #[module(buffer)] Tensor),
    None,
}

#[derive(Module)]
struct Wrapped(#[module(name = "weight")] Tensor, #[module(skip)] Cell<i32>);

#[derive(Module)]
#[module(reset = Self::draw)]
struct Model<'a> {
    #[module(buffer)]
    index: Tensor,
    #[module(buffer, non_persistent)]
    mask: Option<Tensor>,
    embed: Wrapped,
    layers: Vec<Block<nn::LayerNorm>>,
    mlps: Vec<Mlp>,
    boxed: Box<dyn Module>,
    shared: &'a nn::Linear,
    again: &'a nn::Linear,
    name: &'static str,
}

impl Model<'_> {
    fn draw(&self) -> Result<()> {
        shardweave::nn::init::constant_(&self.embed.0, 7.0)
    }
}

fn block(gate: bool) -> Block<nn::LayerNorm> {
    Block {
        norm: nn::LayerNorm::new(2).unwrap(),
        attention: nn::Linear::without_bias(2, 2).unwrap(),
        gate: gate.then(|| nn::Linear::without_bias(2, 2).unwrap()),
        scales: vec![ones(&[1]), ones(&[2])],
        heads: 1,
        r#type: Some(ones(&[4])),
        training: Training::new(),
    }
}

fn model(shared: &nn::Linear) -> Model<'_> {
    let linear = || nn::Linear::without_bias(3, 2).unwrap();
    Model {
        index: Tensor::arange(3).unwrap(),
        mask: Some(ones(&[2])),
        embed: Wrapped(ones(&[5, 2]), Cell::new(1)),
        layers: vec![block(true), block(false)],
        mlps: vec![
            Mlp::Dense(linear()),
            Mlp::Experts { router: ones(&[2]), experts: [linear(), linear()] },
            Mlp::Pair(ones(&[1, 1]), ones(&[1])),
            Mlp::None,
        ],
        boxed: Box::new(linear()),
        shared,
        again: shared,
        name: "model",
    }
}

#[test]
fn members_are_named_by_fields() {
    let shared = nn::Linear::without_bias(1, 6).unwrap();
    let model = model(&shared);
    assert_eq!((model.name, model.layers[0].heads, model.embed.1.get()), ("model", 1, 1));
    let expected = [
        "embed.weight",
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "layers.0.c_attn.weight",
        "layers.0.gate.weight",
        "layers.0.scales.0",
        "layers.0.scales.1",
        "layers.0.type",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
        "layers.1.c_attn.weight",
        "layers.1.scales.0",
        "layers.1.scales.1",
        "layers.1.type",
        "mlps.0.weight",
        "mlps.1.router",
        "mlps.1.experts.0.weight",
        "mlps.1.experts.1.weight",
        "mlps.2.0",
        "boxed.weight",
        "shared.weight", // and again.weight, which is the same tensor
    ];
    assert_eq!(names(&model), expected);
    let buffers: Vec<String> = model.buffers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(buffers, ["index", "mask", "mlps.2.1"]);
}

#[test]
fn modules_are_switched_drawn_and_loaded() {
    let shared = nn::Linear::without_bias(1, 6).unwrap();
    let model = model(&shared);
    model.eval();
    assert!(model.layers.iter().all(|layer| !layer.training.get()));
    model.layers[1].train();
    let training: Vec<bool> = model.layers.iter().map(|layer| layer.training.get()).collect();
    assert_eq!(training, [false, true]);

    // Modules inside are drawn, then the model's own function has its say.
    shardweave::nn::init::zeros_(&shared.weight).unwrap();
    model.initialize().unwrap();
    assert_eq!(model.embed.0.to_vec::<f32>().unwrap(), [7.0; 10]);
    let drawn: f64 = shared.weight.detach().unwrap().abs().unwrap().sum().unwrap().item().unwrap();
    assert!(drawn > 0.0);

    let mut asked = Vec::new();
    let of =
        |name: &str| model.parameters().into_iter().chain(model.buffers()).find(|m| m.0 == name);
    model
        .load(&mut |name| {
            asked.push(name.to_owned());
            let sizes = of(name).unwrap().1.sizes()?;
            TensorOptions::new().dtype(DType::Bf16).full(&sizes, 3.0)
        })
        .unwrap();
    let mut expected = names(&model);
    expected.extend(["index".to_owned(), "mlps.2.1".to_owned()]); // not the mask
    assert_eq!(asked, expected);
    assert_eq!(model.index.to_vec::<i64>().unwrap(), [3; 3]);
    assert_eq!(shared.weight.to_vec::<f32>().unwrap(), [3.0; 6]);
    assert!(shared.weight.requires_grad().unwrap() && shared.weight.is_leaf().unwrap());

    let missing = |name: &str| match name {
        "layers.1.type" => Err(Error::new(Code::NotFound, "not in the file")),
        name => of(name).map(|(_, tensor)| tensor.detach()).unwrap(),
    };
    let error = model.load(&mut { missing }).unwrap_err();
    assert_eq!(error, Error::new(Code::NotFound, "Module::load: 'layers.1.type': not in the file"));
}

#[derive(Module)]
struct Fails {
    inner: Vec<Refuses>,
}

#[derive(Module)]
#[module(reset = refuse)]
struct Refuses {}

fn refuse(_: &Refuses) -> Result<()> {
    Err(Error::new(Code::DataLoss, "no"))
}

#[test]
fn a_module_that_cannot_be_drawn_is_named() {
    let model = Fails { inner: vec![Refuses {}] };
    let expected = Error::new(Code::DataLoss, "Module::initialize: 'inner.0': no");
    assert_eq!(model.initialize().unwrap_err(), expected);
}

/// A parameter that is loaded keeps its layout, whether the file's is plain or sharded, and odd
/// sizes are cut as ever.
#[test]
fn sharded_modules_are_loaded() {
    for ranks in [1, 2, 3, 4] {
        World::threads(ranks)
            .run(|world| {
                let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
                let layer = nn::Linear::new(7, 5)?;
                let plan = shardweave::ParameterPlan::new().line("*", &[("tp", Shard(0))]);
                layer.distribute(&mesh, &plan, Source::default())?;
                let weight = Tensor::arange(35)?.view(&[5, 7])?;
                layer.load(&mut |name| match name {
                    "weight" => Ok(weight.clone()),
                    _ => Tensor::arange(5)?.distribute(&mesh, [("tp", Replicate)]),
                })?;
                assert_eq!(layer.weight.layout()?.to_string(), "[S(0)]");
                let loaded = layer.weight.full_tensor()?.detach()?.to_vec::<f32>()?;
                assert_eq!(loaded, (0..35).map(|i| i as f32).collect::<Vec<_>>());
                let bias = layer.bias.as_ref().unwrap().full_tensor()?.detach()?;
                assert_eq!(bias.to_vec::<f32>()?, [0.0, 1.0, 2.0, 3.0, 4.0]);
                let error = layer.load(&mut |_| Tensor::ones(&[7, 5])).unwrap_err();
                let expected = "Module::load: 'weight' is [5, 7]; the tensor for it is [7, 5]";
                assert_eq!(error.message(), expected);
                Ok(())
            })
            .unwrap();
    }
}

/// A plain tensor is the same on all ranks, or an error.
#[test]
fn what_is_loaded_is_compared_over_the_ranks() {
    let error = World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let layer = nn::Linear::new(4, 3)?;
            layer.distribute(&mesh, &shardweave::ParameterPlan::new(), Source::default())?;
            layer.load(&mut |name| {
                let own = if name == "bias" { world.rank() as f64 } else { 0.5 };
                Tensor::full(if name == "bias" { &[3] } else { &[3, 4] }, own)
            })?;
            layer.bias.as_ref().unwrap().detach()?.sum()?.item::<f64>()
        })
        .unwrap_err();
    assert!(error.message().contains("differs from rank to rank"), "{error}");
}

#[test]
fn operators_on_results_and_numbers() {
    let x = Tensor::from_slice(&[1.0f64, 2.0, 4.0], &[3]).unwrap();
    let y = Tensor::from_slice(&[3.0f64, 5.0, 7.0], &[3]).unwrap();
    let all = |result: Result<Tensor>| result.unwrap().to_vec::<f64>().unwrap();
    // A tensor, a handle and a result on each side.
    let results = [
        &x * &y + &x,
        &x * &y + x.clone(),
        x.clone() * y.clone() + &x,
        &x + &x * &y,
        x.clone() + &x * &y,
        (&x * &y).plus(&x),
        Ok(&x).plus(&x * &y),
        &x + Ok::<_, Error>(&(&x * &y).unwrap()),
    ];
    for (i, result) in results.into_iter().enumerate() {
        assert_eq!(all(result), [4.0, 12.0, 32.0], "{i}");
    }
    assert_eq!(all(&y - &x / 2.0), [2.5, 4.0, 5.0]);
    assert_eq!(all(&y - &x - &x), [1.0, 1.0, -1.0]);
    assert_eq!(all(&y / &x / &x), [3.0, 1.25, 0.4375]);
    assert_eq!(all((&x * &x).times(2).minus(&x * 1.0f32).over(0.5)), [2.0, 12.0, 56.0]);
    assert_eq!(all(2.0 - &x), [1.0, 0.0, -2.0]);
    assert_eq!(all(2 - x.clone()), [1.0, 0.0, -2.0]);
    assert_eq!(all(8.0 / &x), [8.0, 4.0, 2.0]);
    assert_eq!(all(true + &x), [2.0, 3.0, 5.0]);
    assert_eq!(all(&x % 3), [1.0, 2.0, 1.0]);
    assert_eq!(all(-&x * &y), [-3.0, -10.0, -28.0]);
    let z = &x * Complex { re: 0.0, im: 1.0 };
    assert_eq!(z.unwrap().to_vec::<Complex<f64>>().unwrap()[2], Complex { re: 0.0, im: 4.0 });

    // Integers stay integers, and bools are numbers.
    let n = Tensor::arange(3).unwrap();
    let integers = |result: Result<Tensor>| result.unwrap().to_vec::<i64>().unwrap();
    assert_eq!(integers(&n * 3 - &n), [0, 2, 4]);
    assert_eq!(integers(1 - &n), [1, 0, -1]);
    assert_eq!(integers(&n + true), [1, 2, 3]);
    assert_eq!(integers(&n * i64::MAX)[1], i64::MAX);
    assert_eq!((&n * 3.0).unwrap().dtype().unwrap(), DType::F32);
    assert_eq!((&n / 2).unwrap().to_vec::<f32>().unwrap(), [0.0, 0.5, 1.0]);

    // Comparisons, with tensors and numbers, and what is done with them.
    let flags = |result: Result<Tensor>| result.unwrap().to_vec::<bool>().unwrap();
    assert_eq!(flags(x.lt(2)), [true, false, false]);
    assert_eq!(flags(x.le(2.0)), [true, true, false]);
    assert_eq!(flags(x.gt(&n)), [true, true, true]);
    assert_eq!(flags(x.ge(&x * 1.5 - &n)), [false, true, true]);
    assert_eq!(flags(x.eq(4)), [false, false, true]);
    assert_eq!(flags(x.ne(&x)), [false; 3]);
    assert_eq!(flags(n.gt(0).unwrap().eq(true)), [false, true, true]);
    assert_eq!(flags(x.gt(1).unwrap() & x.lt(4).unwrap()), [false, true, false]);
    assert_eq!(flags(x.gt(2).unwrap() | x.lt(2)), [true, false, true]);
    assert_eq!(flags(x.gt(2).unwrap() ^ true), [true, true, false]);
    assert_eq!(flags(!x.gt(2).unwrap()), [true, true, false]);

    // In place.
    let w = x.copy().unwrap();
    w.add_(1).unwrap();
    w.mul_(&y).unwrap();
    w.sub_(0.5).unwrap();
    w.div_(&x).unwrap();
    assert_eq!(w.to_vec::<f64>().unwrap(), [5.5, 7.25, 8.625]);
}

#[test]
fn the_first_error_is_passed_on() {
    let (x, y) = (ones(&[2]), ones(&[3]));
    for result in [&x * &y + &x, &x + &x * &y, (&x + &x).times(&x * &y), (&x * &y).plus(&y + &x)] {
        let error = result.unwrap_err();
        assert!(error.message().starts_with("Tensor::mul: "), "{error}");
    }
    assert!((&x - &y).unwrap_err().message().starts_with("Tensor::sub: "));
    assert!((&x * 2.0 + &y).unwrap_err().message().starts_with("Tensor::add: "));
    assert!(x.lt(&y).unwrap_err().message().starts_with("Tensor::lt: "));
    // Where the operator has no such thing.
    let error = (&x & true).unwrap_err();
    assert!(error.message().starts_with("Tensor::bitand: "), "{error}");
}

/// Generic calls take integers of every kind, and bools, where a number is wanted.
#[test]
fn numbers_of_generic_calls() {
    let x = Tensor::arange(3).unwrap();
    let add = Op::find("aten::add.Scalar").unwrap();
    let numbers = [
        add.call::<Tensor>(args![&x, 2u64]),
        add.call::<Tensor>(args![&x, 2usize]),
        add.call::<Tensor>(args![&x, 2isize]),
        add.call::<Tensor>(args![&x, 2u8]),
        add.call::<Tensor>(args![&x, true, 2i16]),
    ];
    for result in numbers {
        assert_eq!(result.unwrap().to_vec::<i64>().unwrap(), [2, 3, 4]);
    }
    let full = Op::find("aten::full").unwrap();
    let yes: Tensor = full.call(args![&[2], true]).unwrap();
    assert_eq!(yes.to_vec::<bool>().unwrap(), [true; 2]);
    // What is no i64 is an error where an index is wanted, not another index.
    let error = Op::find("aten::select.int").unwrap().call::<Tensor>(args![&x, 0, u64::MAX]);
    assert!(error.is_err());
}

#[test]
fn indices_as_in_python() {
    let x = Tensor::arange(2 * 3 * 4).unwrap().view(&[2, 3, 4]).unwrap();
    let sizes = |result: Result<Tensor>| result.unwrap().sizes().unwrap();
    let elements = |result: Result<Tensor>| result.unwrap().to_vec::<i64>().unwrap();
    assert_eq!(sizes(x.i(..)), [2, 3, 4]);
    assert_eq!(elements(x.i((1, 2))), [20, 21, 22, 23]);
    assert_eq!(elements(x.i((-1, -1, -1))), [23]);
    assert_eq!(elements(x.i((0, 0, 1..3))), [1, 2]);
    assert_eq!(elements(x.i((0, 0, 1..=3))), [1, 2, 3]);
    let (last, one, two) = (-1, 1, 2);
    assert_eq!(elements(x.i((0, 0, 1..=last))), [1, 2, 3]);
    assert_eq!(elements(x.i((0, 0, ..=-2))), [0, 1, 2]);
    assert_eq!(elements(x.i((0, 0, -2..))), [2, 3]);
    assert_eq!(sizes(x.i((.., .., ..99))), [2, 3, 4]);
    assert_eq!(sizes(x.i((.., two..one))), [2, 0, 4]);
    assert_eq!(sizes(x.i((NewAxis, .., NewAxis, 0))), [1, 2, 1, 4]);
    assert_eq!(sizes(x.i((Ellipsis, 0))), [2, 3]);
    assert_eq!(sizes(x.i((0, Ellipsis, NewAxis))), [3, 4, 1]);
    assert_eq!(sizes(x.i(Ellipsis)), [2, 3, 4]);
    let (i, j) = (1usize, 2i64); // of whatever type
    assert_eq!(elements(x.i((i, j, ..i))), [20]);
    assert_eq!(elements(x.i((i, j, j..=3))), [22, 23]);
    let items = [IndexItem::At(0), IndexItem::Range(None, Some(1)), IndexItem::At(3)];
    assert_eq!(elements(x.i(&items[..])), [3]);

    // Tensors: of indices, and masks of one dimension and of several.
    let rows = Tensor::from_slice(&[2i64, 0, -1], &[3]).unwrap();
    assert_eq!(elements(x.i((1, &rows, 0))), [20, 12, 20]);
    assert_eq!(sizes(x.i((.., &rows, NewAxis, 1..))), [2, 3, 1, 3]);
    let pairs = Tensor::from_slice(&[0i64, 1, 1], &[3]).unwrap();
    assert_eq!(elements(x.i((&pairs, &rows, 3))), [11, 15, 23]);
    let mask = x.i((.., .., 0)).unwrap().gt(8).unwrap(); // 12, 16, 20
    assert_eq!(elements(x.i((&mask, 1))), [13, 17, 21]);
    assert_eq!(sizes(x.i((&mask, ..2))), [3, 2]);
    assert_eq!(sizes(x.i((&mask, Ellipsis, NewAxis))), [3, 4, 1]);
    let one = Tensor::from_slice(&[true, false, true], &[3]).unwrap();
    assert_eq!(elements(x.i((0, &one, 1))), [1, 9]);

    // A view shares memory, as it does in torch.
    let y = x.copy().unwrap();
    y.i((0, 0)).unwrap().fill_(9.0).unwrap();
    assert_eq!(elements(y.i((0, ..2, 0))), [9, 4]);

    let error = x.i((0, 0, 0, 0)).unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange);
    let text = "Tensor::i: the index has 4 dimensions; wanted 3 at most: the tensor's sizes are";
    assert!(error.message().starts_with(text), "{error}");
    let error = x.i((Ellipsis, 0, Ellipsis)).unwrap_err();
    assert!(error.message().contains("2 Ellipsis; wanted 1 at most"), "{error}");
    assert!(x.i(2).unwrap_err().message().starts_with("Tensor::i: "));
}

#[test]
fn indices_of_sharded_tensors() {
    for ranks in [2, 3] {
        World::threads(ranks)
            .run(|world| {
                let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
                let plain = Tensor::arange(7 * 5)?.view(&[7, 5])?;
                let rows = Tensor::from_slice(&[6i64, 0, 3], &[3])?;
                let spread = rows.distribute(&mesh, [("tp", Replicate)])?;
                for dim in [0, 1] {
                    let x = plain.distribute(&mesh, [("tp", Shard(dim))])?;
                    let same = |a: Result<Tensor>, b: Result<Tensor>| -> Result<()> {
                        let (a, b) = (a?.full_tensor()?, b?);
                        assert_eq!(a.sizes()?, b.sizes()?);
                        assert_eq!(a.to_vec::<i64>()?, b.to_vec::<i64>()?);
                        Ok(())
                    };
                    same(x.i((-1, ..3)), plain.i((-1, ..3)))?;
                    same(x.i((2..6, NewAxis, 1)), plain.i((2..6, NewAxis, 1)))?;
                    same(x.i((Ellipsis, -2..)), plain.i((Ellipsis, -2..)))?;
                    same(x.i((&spread, 1)), plain.i((&rows, 1)))?;
                    same((&x * 2).plus(x.i((.., 0..1))), (&plain * 2).plus(plain.i((.., 0..1))))?;
                }
                Ok(())
            })
            .unwrap();
    }
}

/// As two optimizers that were made by hand.
#[test]
fn groups_of_parameters() {
    let make = || -> Result<nn::Linear> {
        let layer = nn::init::skip(|| nn::Linear::new(3, 2))?;
        nn::init::ones_(&layer.weight)?;
        nn::init::ones_(layer.bias.as_ref().unwrap())?;
        Ok(layer)
    };
    let step = |layer: &nn::Linear| -> Result<()> {
        layer.zero_grad()?;
        let x = Tensor::arange(6)?.view(&[2, 3])?.to_dtype(DType::F32)?;
        let y = shardweave::nn::Layer::forward(layer, &x)?;
        (&y * &y)?.sum()?.backward()
    };
    let both = |layer: &nn::Linear| -> Result<Vec<f32>> {
        let mut all = layer.weight.to_vec::<f32>()?;
        all.extend(layer.bias.as_ref().unwrap().to_vec::<f32>()?);
        Ok(all)
    };
    let schedule = Schedule::cosine(10).warmup(2).floor(0.1);
    let run = || -> Result<()> {
        let (by_groups, by_hand) = (make()?, make()?);
        let base = AdamW::new(0.1).weight_decay(0.3);
        let groups = base.build_groups(&by_groups, |name, _, options| {
            Ok(match name {
                "bias" => AdamW::new(0.2).weight_decay(0.0),
                _ => options,
            })
        })?;
        assert_eq!(groups.groups().len(), 2);
        let weight = base.build_for(&[&by_hand.weight])?;
        let bias = AdamW::new(0.2).weight_decay(0.0);
        let bias = bias.build_for(&[by_hand.bias.as_ref().unwrap()])?;
        for i in 0..4 {
            schedule.apply(&groups, 0.1, i)?;
            schedule.apply(&weight, 0.1, i)?;
            schedule.apply(&bias, 0.2, i)?;
            step(&by_groups)?;
            step(&by_hand)?;
            groups.step()?;
            weight.step()?;
            bias.step()?;
            assert_eq!(both(&by_groups)?, both(&by_hand)?);
        }
        assert_ne!(both(&by_groups)?, both(&make()?)?);
        groups.zero_grad()?;
        assert!(by_groups.weight.grad()?.is_none());
        assert_eq!(groups.groups()[1].learning_rate()?, 0.2 * schedule.factor(3));

        // Of one kind, one optimizer; what fails names the parameter.
        let one = Sgd::new(0.0).build_groups(&by_groups, |_, _, options| Ok(options))?;
        assert_eq!(one.groups().len(), 1);
        one.set_learning_rate(0.5)?;
        assert_eq!(one.groups()[0].learning_rate()?, 0.5);
        let error =
            Sgd::new(0.1).build_groups(&by_groups, |_, _, _| Err(Error::new(Code::DataLoss, "no")));
        assert_eq!(error.unwrap_err().message(), "Sgd::build_groups: 'weight': no");
        Ok(())
    };
    run().unwrap();
}

/// Halves go in and come out as they are.
#[test]
fn halves_of_the_host() {
    let numbers = [Bf16::from(1.5), Bf16::from(-0.25)];
    let x = Tensor::from_slice(&numbers, &[2]).unwrap();
    let y = (&x * 2 + &x).unwrap();
    assert_eq!(y.dtype().unwrap(), DType::Bf16);
    assert_eq!(y.to_vec::<Bf16>().unwrap(), [Bf16::from(4.5), Bf16::from(-0.75)]);
}

/// By hand, what the macro writes.
struct ByHand(nn::Linear, Training);

impl Module for ByHand {
    fn members(&self, members: &mut Members) {
        members.child("inner", &self.0);
        members.training(&self.1);
        let object: &dyn Module = &self.0;
        members.child("again", object);
    }
}

#[test]
fn modules_by_hand() {
    let module = ByHand(nn::Linear::new(2, 2).unwrap(), Training::new());
    assert_eq!(names(&module), ["inner.weight", "inner.bias"]);
    module.eval();
    assert!(!module.1.get());
}

/// What an enum wraps is drawn anew, and says how it shards, as what a field has.
#[test]
fn what_an_enum_wraps_is_initialized() -> Result<()> {
    #[derive(Module)]
    enum Projection {
        Dense(nn::Linear),
    }
    let projection =
        nn::init::skip(|| -> Result<Projection> { Ok(Projection::Dense(nn::Linear::new(3, 8)?)) })?;
    let Projection::Dense(linear) = &projection;
    shardweave::no_grad(|| linear.weight.fill_(0.0))?;
    projection.initialize()?;
    assert!(linear.weight.abs()?.sum()?.item::<f64>()? > 0.0);
    Ok(())
}
