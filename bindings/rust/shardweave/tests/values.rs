//! What goes in and comes out: elements of every dtype, texts, messages, and state of optimizers.
#![warn(unsafe_op_in_unsafe_fn)]

use std::ffi::{c_void, CStr};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

use shardweave::{
    args, clip_grad_norm, AdamW, Bf16, ClipOptions, Code, Complex, DType, Device, Element, Error,
    Layout, Members, Module, Op, ParameterPlan, Placement::*, ReduceOp, Result, ScriptModule, Sgd,
    Source, Tensor, TensorOptions, Value, World, F16,
};
use shardweave_sys as sys;

const ALL: [DType; 18] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::Bf16,
    DType::F8E4m3,
    DType::F8E5m2,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
    DType::C32,
    DType::C64,
    DType::C128,
];

/// This crate's names and sizes are the library's, and it knows all that the library knows.
#[test]
fn dtypes_are_those_of_the_library() {
    let mut known = 0;
    for number in -1..200 {
        // SAFETY: functions of a number; the name lives as long as the library.
        let (size, name) = unsafe {
            let name = CStr::from_ptr(sys::swv_dtype_name(number)).to_str().unwrap();
            (sys::swv_dtype_size(number), name)
        };
        match ALL.iter().find(|dtype| **dtype as i32 == number) {
            Some(dtype) => {
                assert_eq!((dtype.to_string().as_str(), dtype.size()), (name, size));
                assert_eq!(name.parse(), Ok(*dtype));
                known += 1;
            }
            None => assert_eq!((name, size), ("unknown", 0), "{number} is no DType"),
        }
    }
    assert_eq!(known, ALL.len());
}

#[cfg(feature = "serde")]
#[test]
fn what_plans_are_made_of_as_data() {
    fn there_and_back<T>(value: T, json: &str)
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
    {
        assert_eq!(serde_json::to_string(&value).unwrap(), json);
        assert_eq!(serde_json::from_str::<T>(json).unwrap(), value);
    }
    there_and_back(DType::F8E4m3, "\"f8e4m3\"");
    there_and_back([ReduceOp::Avg, ReduceOp::Product], "[\"avg\",\"product\"]");
    there_and_back(StridedShard { dim: 1, split_factor: 3 }, "\"S(1, sf=3)\"");
    let layout = Layout::new(&[Shard(0), Partial(ReduceOp::Max)]).unwrap();
    there_and_back(layout, "\"[S(0), P(max)]\"");
    let plan = Layout::parse("[S(0)]").unwrap();
    let plan = plan.plan_to(&Layout::parse("[R]").unwrap(), &[2], &[4, 3], DType::F32).unwrap();
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!((&json["bytes"], &json["steps"]), (&plan.bytes.into(), &plan.steps.into()));
    for (text, wanted) in [("\"f33\"", "'f33' is no dtype"), ("3", "invalid type")] {
        let error = serde_json::from_str::<DType>(text).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    assert!(serde_json::from_str::<Layout>("\"[S(0), Q]\"").is_err());
}

#[cfg(feature = "half")]
#[test]
fn numbers_of_the_crate_half() {
    use half::{bf16, f16};
    let numbers = hard_numbers();
    for number in &numbers {
        // The two ways to round are one.
        assert_eq!(F16::from(*number).to_bits(), f16::from_f32(*number).to_bits(), "{number:e}");
        assert_eq!(Bf16::from(*number).to_bits(), bf16::from_f32(*number).to_bits(), "{number:e}");
    }
    assert_eq!(f16::from(F16::from(1.5)), f16::from_f32(1.5));
    assert_eq!(Bf16::from(bf16::from_f32(-2.0)), Bf16::from(-2.0));
    there_and_back(&[f16::from_f32(1.5), f16::MAX, f16::from_f32(-0.1)]);
    there_and_back(&[bf16::from_f32(1.5), bf16::MAX, bf16::from_f32(-0.1)]);
    let x = Tensor::from_slice(&[f16::from_f32(0.5)], &[1]).unwrap();
    assert_eq!((x.dtype().unwrap(), x.item::<f16>().unwrap()), (DType::F16, f16::from_f32(0.5)));
    let x = Tensor::from_slice(&[bf16::from_f32(0.5)], &[1]).unwrap();
    assert_eq!((x.dtype().unwrap(), x.item::<bf16>().unwrap()), (DType::Bf16, bf16::from_f32(0.5)));
    let pair = Complex { re: f16::from_f32(1.0), im: f16::from_f32(2.0) };
    let x = Tensor::from_slice(&[pair], &[]).unwrap();
    assert_eq!(x.to_vec::<Complex<f16>>().unwrap(), [pair]);
    assert_eq!(x.item::<Complex<f64>>().unwrap(), Complex { re: 1.0, im: 2.0 });
}

#[test]
fn the_item_of_every_dtype() {
    for dtype in ALL {
        let one = Tensor::ones(&[1, 1]).unwrap().to_dtype(dtype).unwrap();
        assert_eq!(one.dtype().unwrap(), dtype);
        let value: Value = one.item().unwrap_or_else(|error| panic!("{dtype}: {error}"));
        match value {
            Value::Float(number) => assert_eq!(number, 1.0, "{dtype}"),
            Value::Int(number) => assert_eq!(number, 1, "{dtype}"),
            Value::Bool(flag) => assert!(flag, "{dtype}"),
            Value::Complex(re, im) => assert_eq!((re, im), (1.0, 0.0), "{dtype}"),
            other => panic!("{dtype}: {other:?}"),
        }
    }
    let item = |number: f64, dtype| Tensor::full(&[], number).unwrap().to_dtype(dtype).unwrap();
    assert_eq!(item(-7.0, DType::I8).item::<i8>().unwrap(), -7);
    assert_eq!(item(300.0, DType::I32).item::<u64>().unwrap(), 300);
    assert_eq!(item(300.0, DType::I16).item::<usize>().unwrap(), 300);
    assert_eq!(item(0.5, DType::F16).item::<F16>().unwrap(), F16::from(0.5));
    assert_eq!(item(0.5, DType::Bf16).item::<Bf16>().unwrap(), Bf16::from(0.5));
    assert_eq!(item(0.5, DType::F16).item::<f32>().unwrap(), 0.5);
    assert!(item(2.0, DType::Bool).item::<bool>().unwrap());
    let error = item(300.0, DType::I32).item::<u8>().unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange);
    assert!(error.message().contains("300") && error.message().contains("u8"), "{error}");
    let error = item(-1.0, DType::I32).item::<u64>().unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange);
    let large = Tensor::from_slice(&[u64::MAX], &[1]).unwrap();
    assert_eq!(large.item::<u64>().unwrap_err().code(), Code::OutOfRange);
    assert_eq!(large.to_vec::<u64>().unwrap(), [u64::MAX]);
}

fn there_and_back<T: Element + PartialEq + std::fmt::Debug + Sync>(data: &[T]) {
    let n = data.len() as i64;
    let x = Tensor::from_slice(data, &[n]).unwrap();
    assert_eq!(x.dtype().unwrap(), T::DTYPE);
    assert_eq!(x.to_vec::<T>().unwrap(), data);
    let y = x.copy().unwrap();
    y.zero_().unwrap();
    assert_ne!(y.to_vec::<T>().unwrap(), data);
    y.copy_from_slice(data).unwrap();
    assert_eq!(y.to_vec::<T>().unwrap(), data);
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let parts = Tensor::from_slice(data, &[n])?.distribute(&mesh, [("x", Shard(0))])?;
            assert_eq!(parts.full_tensor()?.to_vec::<T>()?, data);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{}: {error}", T::DTYPE));
}

#[test]
fn elements_of_every_type_go_there_and_back() {
    there_and_back(&[true, false, true]);
    there_and_back(&[F16::from(1.5), F16::from(-0.1), F16::from(65504.0)]);
    there_and_back(&[Bf16::from(1.5), Bf16::from(-0.1), Bf16::from(1e30)]);
    there_and_back(&[Complex { re: 1.0f32, im: -2.0 }, Complex { re: 0.5, im: 0.25 }]);
    there_and_back(&[Complex { re: 1.0f64, im: -2.0 }, Complex { re: 0.5, im: 0.25 }]);
    there_and_back(&[1.5f64, -0.1, 1e300]);
    there_and_back(&[1u16, 2, u16::MAX]);
    let x = Tensor::from_slice(&[Complex { re: F16::from(1.0), im: F16::from(2.0) }], &[]).unwrap();
    assert_eq!(x.item::<Complex<f64>>().unwrap(), Complex { re: 1.0, im: 2.0 });
}

/// LibTorch keeps any byte in a tensor of bools: Rust must not see it as one.
#[test]
fn a_bool_is_true_or_false() {
    let bytes = Tensor::from_slice(&[0u8, 1, 2, 255], &[4]).unwrap();
    let view = Op::find("aten::view.dtype").unwrap();
    let bools: Tensor = view.call(args![&bytes, DType::Bool]).unwrap();
    let flags = bools.to_vec::<bool>().unwrap();
    // SAFETY: bools are bytes; this looks at what they are made of.
    let made_of = unsafe { std::slice::from_raw_parts(flags.as_ptr().cast::<u8>(), flags.len()) };
    assert_eq!(made_of, [0, 1, 1, 1]);

    World::threads(2)
        .run(|world| {
            let comm = world.comm()?;
            let mut all = [false; 4];
            comm.all_gather(&[world.rank() == 0, true], &mut all)?;
            assert_eq!(all, [true, true, false, true]);
            let pending = comm.start_broadcast(vec![world.rank() == 1; 3], 1)?;
            assert_eq!(pending.wait()?, [true; 3]);
            let mut numbers = [F16::from(world.rank() as f32); 3];
            comm.broadcast(&mut numbers, 1)?;
            assert_eq!(numbers, [F16::from(1.0); 3]);
            let mut sum = [Bf16::from(1.0), Bf16::from(0.5)];
            comm.all_reduce(&mut sum, ReduceOp::Sum)?;
            assert_eq!(sum, [Bf16::from(2.0), Bf16::from(1.0)]);
            Ok(())
        })
        .unwrap();
}

/// Numbers of 32 bits that are hard to round, and many others.
fn hard_numbers() -> Vec<f32> {
    let mut bits = vec![0u32, 1, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff];
    for exponent in (0..256).map(|e| e << 23) {
        for mantissa in [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001] {
            bits.push(exponent | mantissa);
            bits.push(exponent | 0x7f_0000 | mantissa | 0x8000_0000);
        }
    }
    let mut state = 12345u32;
    for _ in 0..20_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bits.push(state);
        bits.push(state >> 5 | 0x3000_0000);
    }
    bits.into_iter().map(f32::from_bits).filter(|number| !number.is_nan()).collect()
}

#[test]
fn small_floats_round_as_those_of_libtorch() {
    let numbers = hard_numbers();
    let x = Tensor::from_slice(&numbers, &[numbers.len() as i64]).unwrap();
    let half = x.to_dtype(DType::F16).unwrap().to_vec::<F16>().unwrap();
    let brain = x.to_dtype(DType::Bf16).unwrap().to_vec::<Bf16>().unwrap();
    for (number, (half, brain)) in numbers.iter().zip(half.iter().zip(&brain)) {
        assert_eq!(F16::from(*number).to_bits(), half.to_bits(), "{number:e}");
        assert_eq!(Bf16::from(*number).to_bits(), brain.to_bits(), "{number:e}");
    }
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let halves: Vec<F16> = all.iter().map(|bits| F16::from_bits(*bits)).collect();
    let wide = Tensor::from_slice(&halves, &[halves.len() as i64]).unwrap();
    let wide = wide.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
    for (half, wide) in halves.into_iter().zip(wide) {
        let number = f32::from(half);
        assert!(number == wide || number.is_nan() && wide.is_nan(), "{:x}", half.to_bits());
        if !number.is_nan() {
            assert_eq!(F16::from(number).to_bits(), half.to_bits());
            let brain = Bf16::from_bits(half.to_bits());
            assert!(
                f32::from(brain).is_nan()
                    || Bf16::from(f32::from(brain)).to_bits() == brain.to_bits()
            );
        }
    }
    assert!(f32::from(F16::from(f32::NAN)).is_nan() && f32::from(Bf16::from(f32::NAN)).is_nan());
    assert!(F16::from(f32::NAN) != F16::from(f32::NAN) && F16::from(1.0) < F16::from(2.0));
    assert_eq!(
        format!("{} {:?} {:.1}", F16::from(0.5), Bf16::from(2.0), F16::from(0.25)),
        "0.5 2.0 0.2"
    );
}

#[test]
fn tensors_as_text() {
    let plain = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let elements = " 1  2\n 3  4\n[ CPUFloatType{2,2} ]";
    assert_eq!((plain.to_string(), format!("{plain:#}")), (elements.into(), elements.into()));
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
            let x = x.distribute(&mesh, [("x", Shard(0))])?;
            let before = world.counters()?;
            let short = x.to_string();
            assert!(short.starts_with("DTensor[2, 2] Float [S(0)]") && !short.contains('\n'));
            // println! holds a lock while it formats: whatever the flags, nothing may be sent.
            for text in [format!("{x:#}"), format!("{x:?}"), format!("{x:#?}"), format!("{x:.2}")] {
                assert_eq!(text, short);
            }
            assert_eq!(world.counters()?, before, "nothing was sent");
            assert_eq!(x.values_to_string()?, format!("{short}\n{elements}"));
            Ok(())
        })
        .unwrap();
    assert_eq!(plain.values_to_string().unwrap(), elements);
    let errors = World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("x", 2)])?;
        mesh.connect()?;
        let x = TensorOptions::new().on(&mesh, [("x", Shard(0))])?.ones(&[4])?;
        if world.rank() == 1 {
            return Ok(None); // it is gone
        }
        Ok(x.values_to_string().err())
    });
    let error = errors.unwrap().remove(0).unwrap();
    let text = error.message();
    assert!(text.starts_with("Tensor::values_to_string: ") && text.contains("rank 1"), "{text}");
}

struct One(Tensor);
impl Module for One {
    fn members(&self, members: &mut Members) {
        members.parameter("weight", &self.0);
    }
}

#[test]
fn messages_name_what_the_caller_called() {
    let x = Tensor::ones(&[2, 3]).unwrap();
    let world = World::counting(0, 2).unwrap();
    let mesh = world.device_mesh(&[("x", 2)]).unwrap();
    let (half, seven) =
        (Tensor::full(&[1], 0.5).unwrap(), Tensor::from_slice(&[700i64], &[]).unwrap());
    let y = x.distribute(&mesh, [("x", Shard(0))]).unwrap();
    let comm = world.comm().unwrap();
    let model = One(Tensor::ones(&[2, 3]).unwrap());
    let missing = ParameterPlan::new().line("nothing", &[("x", Shard(0))]);
    let unknown = ParameterPlan::new().line("weight", &[("z", Shard(0))]);
    let optimizer = AdamW::new(0.1).build(&model).unwrap();
    let norm = ClipOptions { norm_type: -1.0, ..Default::default() };
    let errors: Vec<(Error, &str)> = vec![
        (Tensor::ones(&[-1]).unwrap_err(), "Tensor::ones: argument 'sizes'"),
        (x.matmul(&x).unwrap_err(), "Tensor::matmul: "),
        ((&x + &Tensor::ones(&[5]).unwrap()).unwrap_err(), "Tensor::add: "),
        (x.narrow(7, 0, 1).unwrap_err(), "Tensor::narrow: "),
        (x.add_(Tensor::ones(&[5]).unwrap()).unwrap_err(), "Tensor::add_: "),
        (x.item::<f32>().unwrap_err(), "Tensor::item: argument 'self' has 6 elements"),
        (x.item::<i64>().unwrap_err(), "Tensor::item: argument 'self' has 6 elements"),
        (
            half.item::<i64>().unwrap_err(),
            "Tensor::item: the result is Float(0.5); wanted an integer",
        ),
        (
            half.item::<u8>().unwrap_err(),
            "Tensor::item: the result is Float(0.5); wanted an integer",
        ),
        (seven.item::<bool>().unwrap_err(), "Tensor::item: the result is Int(700); wanted a bool"),
        (seven.item::<u8>().unwrap_err(), "Tensor::item: the result is 700; wanted u8"),
        (x.layout().unwrap_err(), "Tensor::layout: wanted a DTensor"),
        (x.mesh().unwrap_err(), "Tensor::mesh: wanted a DTensor"),
        (x.to_local().unwrap_err(), "Tensor::to_local: wanted a DTensor"),
        (x.to_local_with_grad("[R]").unwrap_err(), "Tensor::to_local_with_grad: wanted a DTensor"),
        (x.redistribute("[R]").unwrap_err(), "Tensor::redistribute: wanted a DTensor"),
        (y.redistribute("[R").unwrap_err(), "Tensor::redistribute: "),
        (y.redistribute([("z", Replicate)]).unwrap_err(), "Tensor::redistribute: "),
        (y.redistribute("[R, R]").unwrap_err(), "Tensor::redistribute: [R, R] has 2 placements"),
        (x.distribute(&mesh, "[P]").unwrap_err(), "Tensor::distribute: [P(sum)] has a Partial"),
        (x.distribute(&mesh, [("z", Replicate)]).unwrap_err(), "Tensor::distribute: "),
        (y.distribute(&mesh, "[R]").unwrap_err(), "Tensor::distribute: argument 'self' is sharded"),
        (
            Tensor::from_local(&x, &mesh, "[S(0)]", Some(&[7, 3])).unwrap_err(),
            "Tensor::from_local: the local tensor has shape [2, 3]",
        ),
        (TensorOptions::new().on(&mesh, "[").unwrap_err(), "TensorOptions::on: "),
        (mesh.comm("y").unwrap_err(), "Mesh::comm: "),
        (mesh.module_scope("a\0").unwrap_err(), "Mesh::module_scope: "),
        (world.abort("a\0").unwrap_err(), "World::abort: "),
        (comm.send(&[1], usize::MAX, 0).unwrap_err(), "Comm::send: "),
        (comm.send(&[1], 0, -1).unwrap_err(), "Comm::send: "),
        (comm.start_send(vec![1], 7, 0).unwrap_err(), "Comm::start_send: "),
        (comm.start_broadcast(vec![1], 7).unwrap_err(), "Comm::start_broadcast: "),
        (comm.all_to_all_v(&[1], &[2], &mut [1], &[1]).unwrap_err(), "Comm::all_to_all_v: "),
        (
            model.distribute(&mesh, &missing, Source::Same).unwrap_err(),
            "Module::distribute: the plan's entry 1, 'nothing' matches no",
        ),
        (model.distribute(&mesh, &unknown, Source::Same).unwrap_err(), "Module::distribute: "),
        (ScriptModule::load("a\0").unwrap_err(), "ScriptModule::load: "),
        (Op::find("a\0").unwrap_err(), "Op::find: "),
        (
            Op::find("aten::relu").unwrap().call::<i64>(args![&x]).unwrap_err(),
            "Op::call: the result is Tensor",
        ),
        (
            Op::find("aten::sum")
                .unwrap()
                .call_named::<Tensor>(args![&x], &[("dims", 1.into())])
                .unwrap_err(),
            "Op::call_named: aten::sum: has no argument 'dims'; did you mean 'dim'?",
        ),
        (optimizer.state(3, "step").unwrap_err(), "Optimizer::state: parameter 3 of 1"),
        (optimizer.state(0, "speed").unwrap_err(), "Optimizer::state: there is no state 'speed'"),
        (optimizer.set_state(0, "step", &x).unwrap_err(), "Optimizer::set_state: 'step'"),
        (optimizer.set_learning_rate(-1.0).unwrap_err(), "Optimizer::set_learning_rate: "),
        (x.to_vec::<f64>().unwrap_err(), "Tensor::to_vec: "),
        (x.copy_from_slice(&[1f32]).unwrap_err(), "Tensor::copy_from_slice: argument 'data' has 1"),
        (
            Tensor::from_slice(&[1f32; 5], &[2, 3]).unwrap_err(),
            "Tensor::from_slice: argument 'data' has 5 elements",
        ),
        (World::threads(0).run(|_| Ok(())).unwrap_err(), "World::threads: argument 'num_ranks'"),
        (World::local(0).unwrap_err(), "World::local: argument 'num_ranks'"),
        (World::counting(2, 2).unwrap_err(), "World::counting: "),
        (world.device_mesh(&[("x", 3)]).unwrap_err(), "World::device_mesh: "),
        (world.parse_mesh("x").unwrap_err(), "World::parse_mesh: "),
        (mesh.slice(&["y"]).unwrap_err(), "Mesh::slice: "),
        (mesh.find_dim("y").unwrap_err(), "Mesh::find_dim: "),
        (Layout::parse("[").unwrap_err(), "Layout::parse: "),
        (Layout::named(&mesh, &[("y", Replicate)]).unwrap_err(), "Layout::named: "),
        (Op::find("aten::ad").unwrap_err(), "Op::find: "),
        (
            Op::find("aten::relu").unwrap().call::<()>(args![1, 2, 3]).unwrap_err(),
            "Op::call: aten::relu",
        ),
        (AdamW::new(-1.0).build_for(&[&x]).unwrap_err(), "AdamW::build_for: lr is -1"),
        (AdamW::new(-1.0).build(&model).unwrap_err(), "AdamW::build: lr is -1"),
        (Sgd::new(-1.0).build(&model).unwrap_err(), "Sgd::build: lr is -1"),
        (clip_grad_norm(&[&x], 1.0, norm).unwrap_err(), "clip_grad_norm: "),
        (shardweave::set_num_threads(0).unwrap_err(), "set_num_threads: argument 'num_threads'"),
    ];
    for (error, wanted) in errors {
        assert!(error.message().starts_with(wanted), "{error}; wanted {wanted}");
        let others = [
            "swv_",
            "()",
            "[&]",
            "FusedOptimizer",
            "DeviceMesh::",
            "int64_t",
            "_tensor: ",
            "distribute_module",
            "from_local: from_local",
            "layout_of",
            "init_device_mesh",
        ];
        for other in others {
            assert!(!error.message().contains(other), "{error}: {other} is not of Rust");
        }
        // The function once.
        let rest = error.message().split_once(": ").unwrap().1;
        let second = rest.split_once(": ").map_or("", |(second, _)| second);
        let is_word = second.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        assert!(second.is_empty() || !is_word, "{error}: {second} is not of Rust");
    }
}

#[test]
fn an_error_of_main_is_its_message() {
    let error = Error::new(Code::NotFound, "where is it?\nHere it is not.");
    assert_eq!(format!("{error:?}"), "where is it?\nHere it is not. (NotFound)");
    assert_eq!(format!("{error:#?}"), error.to_string());
    let result: std::result::Result<(), Box<dyn std::error::Error>> = Err(error.into());
    assert_eq!(format!("{result:?}"), "Err(where is it?\nHere it is not. (NotFound))");
}

#[test]
fn optimizer_state_is_there_and_can_be_set() {
    let gradient = || Tensor::from_slice(&[0.5f32, -1.0, 2.0, 0.25, 1.0], &[5]);
    let start = || Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0], &[5]);
    let step = |x: &Tensor, optimizer: &shardweave::Optimizer, gradient: &Tensor| -> Result<()> {
        x.set_grad(Some(gradient))?;
        optimizer.step()
    };
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            for sharded in [false, true] {
                let place = |x: Tensor| match sharded {
                    true => x.distribute(&mesh, [("x", Shard(0))]),
                    false => Ok(x),
                };
                let make = || -> Result<Tensor> {
                    let x = place(start()?)?;
                    x.set_requires_grad(true)?;
                    Ok(x)
                };
                let gradient = place(gradient()?)?;
                let adamw = AdamW::new(0.1).amsgrad(true);
                let (x, y) = (make()?, make()?);
                let (whole, first) = (adamw.build_for(&[&x])?, adamw.build_for(&[&y])?);
                let names = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
                for name in names {
                    let state = first.state(0, name)?.expect("before the first step");
                    assert_eq!(state.is_sharded()?, sharded && name != "step", "{name}");
                    assert_eq!(state.abs()?.sum()?.item::<f64>()?, 0.0, "{name}");
                }
                step(&x, &whole, &gradient)?;
                step(&y, &first, &gradient)?;
                // What was saved goes on as if nothing had been.
                let saved: Vec<Tensor> = names
                    .iter()
                    .map(|name| first.state(0, name)?.expect("it has it").copy())
                    .collect::<Result<_>>()?;
                let second = adamw.build_for(&[&y])?;
                for (name, state) in names.iter().zip(&saved) {
                    second.set_state(0, name, state)?;
                }
                step(&x, &whole, &gradient)?;
                step(&y, &second, &gradient)?;
                let of = |x: &Tensor| x.detach()?.full_tensor()?.to_vec::<f32>();
                assert_eq!(of(&x)?, of(&y)?);
                assert_ne!(of(&x)?, start()?.to_vec::<f32>()?);

                let error = second.set_state(0, "momentum", &saved[1]).unwrap_err();
                assert!(error.message().starts_with("Optimizer::set_state: "), "{error}");
                assert!(second.set_state(1, "exp_avg", &saved[1]).is_err());
                let sgd = Sgd::new(0.1).momentum(0.9).build_for(&[&make()?])?;
                assert!(sgd.state(0, "momentum_buffer")?.is_some());
            }
            Ok(())
        })
        .unwrap();
}

/// One tensor under two names.
struct Tied {
    embedding: Tensor,
    head: Tensor,
}

impl Tied {
    fn new() -> Result<Tied> {
        let embedding = Tensor::full(&[4], 1.0)?;
        embedding.set_requires_grad(true)?;
        Ok(Tied { head: embedding.clone(), embedding })
    }
}

impl Module for Tied {
    fn members(&self, members: &mut Members) {
        members.parameter("embedding", &self.embedding);
        members.parameter("head", &self.head);
    }
}

/// clip_grad_norm divides by a little more than the norm.
fn expect_near(x: &Tensor, number: f32) -> Result<()> {
    let all = x.to_vec::<f32>()?;
    assert!(all.len() == 4 && all.iter().all(|x| (x - number).abs() < 1e-5), "{all:?}");
    Ok(())
}

#[test]
fn a_tied_weight_is_one_parameter() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            for sharded in [false, true] {
                let model = Tied::new()?;
                if sharded {
                    let bad = ParameterPlan::new()
                        .line("head", &[("x", Shard(0))])
                        .line("embedding", &[("x", Replicate)]);
                    assert!(model.distribute(&mesh, &bad, Source::Same).is_err(), "two layouts");
                    assert!(!model.head.is_sharded()?, "nothing has changed");
                    let plan = ParameterPlan::new().line("{head,embedding}", &[("x", Shard(0))]);
                    model.distribute(&mesh, &plan, Source::Same)?;
                    assert!(model.head.is_same(&model.embedding)? && model.head.is_sharded()?);
                }
                let names: Vec<String> = model.parameters().into_iter().map(|(n, _)| n).collect();
                assert_eq!(names, ["embedding"]);
                model.embedding.sum()?.backward()?;
                model.finish_grad_sync()?;
                assert_eq!(model.clip_grad_norm(1.0)?, 2.0);
                let gradient = model.head.grad()?.unwrap().full_tensor()?;
                expect_near(&gradient, 0.5)?;
                // Handles that the caller collects, too.
                let both = [&model.embedding, &model.head];
                let norm = clip_grad_norm(&both, 0.5, ClipOptions::default())?;
                assert!((norm - 1.0).abs() < 1e-5, "{norm}");
                let optimizer = Sgd::new(1.0).build(&model)?;
                optimizer.step()?;
                let weight = model.head.detach()?.full_tensor()?;
                expect_near(&weight, 0.75)?; // one step
                AdamW::new(0.1).build(&model)?.step()?;
                model.zero_grad()?;
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_negative_dimension_counts_from_the_end() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let x = Tensor::arange(6)?.view(&[2, 3])?;
            let last = x.distribute(&mesh, [("x", Shard(-1))])?;
            assert_eq!(last.layout()?, Layout::parse("[S(1)]")?);
            assert_eq!(last.to_local()?.sizes()?, [2, [2, 1][world.rank()]]);
            let first = last.redistribute([("x", Shard(-2))])?;
            assert_eq!(first.layout()?, Layout::parse("[S(0)]")?);
            assert_eq!(first.full_tensor()?.to_vec::<i64>()?, [0, 1, 2, 3, 4, 5]);
            assert!(x.distribute(&mesh, [("x", Shard(-3))]).is_err());
            Ok(())
        })
        .unwrap();
}

// --- DLPack ---------------------------------------------------------------------------------------

/// As dlpack.h of DLPack 1.x has it.
#[repr(C)]
struct Managed {
    version: [u32; 2],
    context: *const AtomicUsize,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    dtype: (u8, u8, u16),
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// Six numbers that somebody else owns, and their end.
fn managed(major: u32, ends: &'static AtomicUsize) -> NonNull<c_void> {
    unsafe extern "C" fn deleter(this: *mut Managed) {
        // SAFETY: what `managed` has made, once.
        unsafe {
            let this = Box::from_raw(this);
            drop(Box::from_raw(this.data.cast::<[f32; 6]>()));
            drop(Box::from_raw(this.shape.cast::<[i64; 2]>()));
            (*this.context).fetch_add(1, Ordering::SeqCst);
        }
    }
    let managed = Box::new(Managed {
        version: [major, 0],
        context: ends,
        deleter: Some(deleter),
        flags: 0,
        data: Box::into_raw(Box::new([1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])).cast(),
        device: [1, 0],
        ndim: 2,
        dtype: (2, 32, 1),
        shape: Box::into_raw(Box::new([2i64, 3])).cast(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    });
    NonNull::new(Box::into_raw(managed)).unwrap().cast()
}

/// What from_dlpack's contract says of the deleter: once, whatever happens, and on the thread where
/// the last tensor of the memory ends.
#[test]
fn memory_of_another_library_ends_once() {
    static ENDS: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: nobody else knows the memory; the deleter is good for any thread.
    let error = unsafe { Tensor::from_dlpack(managed(9, &ENDS)) }.unwrap_err();
    assert!(
        error.message().starts_with("Tensor::from_dlpack: ") && error.message().contains("9.0")
    );
    assert_eq!(ENDS.load(Ordering::SeqCst), 1, "also if it fails");

    // SAFETY: the same.
    let tensor = unsafe { Tensor::from_dlpack(managed(1, &ENDS)) }.unwrap();
    let row = tensor.select(0, 1).unwrap();
    tensor.mul_(2.0).unwrap();
    let sent = tensor.to_send().unwrap(); // a copy: the memory does not go with it
    drop(tensor);
    assert_eq!(ENDS.load(Ordering::SeqCst), 1, "a view has it still");
    assert_eq!(row.to_vec::<f32>().unwrap(), [8.0, 10.0, 12.0]);
    drop(row);
    assert_eq!(ENDS.load(Ordering::SeqCst), 2);
    let there = std::thread::spawn(move || sent.into_tensor().to_vec::<f32>().unwrap());
    assert_eq!(there.join().unwrap(), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
    assert_eq!(ENDS.load(Ordering::SeqCst), 2);
}

/// A stream goes to the library, which says that a CPU has none; the memory ends once then, too.
#[test]
fn memory_on_a_stream() {
    static ENDS: AtomicUsize = AtomicUsize::new(0);
    let stream = NonNull::<u64>::dangling().cast();
    // SAFETY: nobody else knows the memory; the stream is only compared with NULL.
    let error = unsafe { Tensor::from_dlpack_on(managed(1, &ENDS), stream) }.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(
        error.message(),
        "Tensor::from_dlpack_on: argument 'stream' is given; a CPU has no streams"
    );
    assert_eq!(ENDS.load(Ordering::SeqCst), 1);
    // SAFETY: the same.
    let error = unsafe { Tensor::ones(&[2]).unwrap().to_dlpack_on(stream) }.unwrap_err();
    assert_eq!(
        error.message(),
        "Tensor::to_dlpack_on: argument 'stream' is given; a CPU has no streams"
    );
}

// --- Options of tensors ---------------------------------------------------------------------------

#[test]
fn options_of_tensors() {
    let there = TensorOptions::new().device(Device::Cpu).dtype(DType::F64).requires_grad(true);
    let x = there.full(&[3], 2.5).unwrap();
    assert_eq!((x.device(), x.dtype(), x.is_leaf()), (Ok(Device::Cpu), Ok(DType::F64), Ok(true)));
    let x = there.from_slice(&[1.5f64, 2.5], &[1, 2]).unwrap();
    assert_eq!((x.sizes().unwrap(), x.requires_grad()), (vec![1, 2], Ok(true)));
    assert_eq!(x.detach().unwrap().to_vec::<f64>().unwrap(), [1.5, 2.5]);

    // Every machine lacks this one.
    let nowhere = TensorOptions::new().device(Device::Cuda(99));
    for (error, function) in [
        (nowhere.zeros(&[2]).unwrap_err(), "Tensor::zeros"),
        (nowhere.from_slice(&[1.0f32], &[1]).unwrap_err(), "Tensor::from_slice"),
    ] {
        assert_eq!(error.code(), Code::Unimplemented);
        let wanted = format!("{function}: argument 'device' is cuda:99, which is not there");
        assert!(error.message().starts_with(&wanted), "{error}"); // and why
    }
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let options = TensorOptions::new().device(Device::Cuda(99)).on(&mesh, "[S(0)]")?;
            assert_eq!(options.ones(&[4]).unwrap_err().code(), Code::Unimplemented);
            let error = options.from_slice(&[1.0f32], &[1]).unwrap_err();
            assert!(error.message().starts_with("Tensor::from_slice: the options have a mesh"));
            Ok(())
        })
        .unwrap();
    let error = there.from_slice(&[1.0f32], &[1]).unwrap_err();
    assert_eq!(error.message(), "Tensor::from_slice: the elements are f32, the options say f64");
}

#[test]
fn devices() {
    let x = Tensor::ones(&[2]).unwrap();
    let there = x.to_device(Device::Cpu).unwrap();
    assert_eq!(there.to_vec::<f32>().unwrap(), [1.0, 1.0]);
    assert_eq!(there.dtype().unwrap(), DType::F32);
    assert!(x.to_device(Device::Cuda(0)).is_err(), "tests run without a GPU");
}

/// A number that no type of the library's has is an error, and no other number.
#[test]
fn integers_above_those_of_64_bits_are_errors() -> Result<()> {
    let x = Tensor::from_slice(&[1u8, 2], &[2])?;
    let mask = Tensor::from_slice(&[true, false], &[2])?;
    let fill = Op::find("aten::masked_fill.Scalar")?;
    let error = fill.call::<Tensor>(args![&x, &mask, u64::MAX]).unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    assert!(error.message().contains("argument 2 is more than 9223372036854775807"), "{error}");
    fill.call::<Tensor>(args![&x, &mask, 7u64])?;
    Ok(())
}
