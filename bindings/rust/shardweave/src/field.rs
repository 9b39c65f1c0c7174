//! What the fields of a struct with `#[derive(Module)]` may be.

use std::marker::PhantomData;
use std::rc::Rc;

use crate::dtype::{DType, Device};
use crate::members::Members;
use crate::module::Module;
use crate::plan::Sharding;
use crate::tensor::Tensor;

/// What a field of a struct with [`#[derive(Module)]`](macro@crate::Module) may be:
///
/// - a [`Tensor`]: a parameter, by the field's name;
/// - a [`Module`]: what it has, below the field's name;
/// - a [`Forward`](crate::Forward) of the struct, a [`Training`](crate::Training), whatever the
///   field's name;
/// - an `Option`, a `Vec`, an array or a slice of one of them: elements are named by their numbers,
///   "blocks.3.norm.weight";
/// - numbers, `bool`, texts, [`DType`], [`Device`], lists of numbers: no members.
///
/// Any other type is an error of the compiler at that field: derive `Module` for it, or say
/// `#[module(skip)]`.
///
/// ```compile_fail,E0277
/// struct Cache(std::collections::HashMap<i64, i64>);
/// #[derive(shardweave::Module)]
/// struct Model {
///     weight: shardweave::Tensor,
///     cache: Cache, // #[module(skip)] is missing
/// }
/// ```
pub trait ModuleField {
    /// Names what the field has.
    fn register(&self, name: &str, members: &mut Members);
}

/// What a field with `#[module(buffer)]` may be: a [`Tensor`], or an `Option`, a `Vec` or an array of
/// them.
pub trait BufferField {
    /// Names it. What is not persistent is in no checkpoint: [`Module::load`] leaves it as it is.
    fn register_buffer(&self, name: &str, persistent: bool, members: &mut Members);
}

impl ModuleField for Tensor {
    fn register(&self, name: &str, members: &mut Members) {
        members.parameter(name, self);
    }
}

impl BufferField for Tensor {
    fn register_buffer(&self, name: &str, persistent: bool, members: &mut Members) {
        if persistent {
            members.buffer(name, self);
        } else {
            members.non_persistent_buffer(name, self);
        }
    }
}

impl<M: Module + ?Sized> ModuleField for M {
    fn register(&self, name: &str, members: &mut Members) {
        members.child(name, self);
    }
}

impl ModuleField for Option<Tensor> {
    fn register(&self, name: &str, members: &mut Members) {
        if let Some(tensor) = self {
            members.parameter(name, tensor);
        }
    }
}

impl BufferField for Option<Tensor> {
    fn register_buffer(&self, name: &str, persistent: bool, members: &mut Members) {
        if let Some(tensor) = self {
            tensor.register_buffer(name, persistent, members);
        }
    }
}

fn numbered(name: &str, number: usize) -> String {
    format!("{name}.{number}")
}

macro_rules! lists_of_tensors {
    ($([$($count:tt)*] $type:ty),*) => {
        $(impl $($count)* ModuleField for $type {
            fn register(&self, name: &str, members: &mut Members) {
                for (i, tensor) in self.iter().enumerate() {
                    members.parameter(&numbered(name, i), tensor);
                }
            }
        }

        impl $($count)* BufferField for $type {
            fn register_buffer(&self, name: &str, persistent: bool, members: &mut Members) {
                for (i, tensor) in self.iter().enumerate() {
                    tensor.register_buffer(&numbered(name, i), persistent, members);
                }
            }
        })*
    };
}
lists_of_tensors!([] Vec<Tensor>, [<const COUNT: usize>] [Tensor; COUNT]);

macro_rules! no_members {
    ($($type:ty),* $(,)?) => {
        $(impl ModuleField for $type {
            fn register(&self, _: &str, _: &mut Members) {}
        }

        impl ModuleField for Option<$type> {
            fn register(&self, _: &str, _: &mut Members) {}
        }

        impl ModuleField for Vec<$type> {
            fn register(&self, _: &str, _: &mut Members) {}
        }

        impl<const COUNT: usize> ModuleField for [$type; COUNT] {
            fn register(&self, _: &str, _: &mut Members) {}
        })*
    };
}
no_members!(
    i8, i16, i32, i64, isize, u8, u16, u32, u64, usize, f32, f64, bool, char, String, &str, DType,
    Device,
);

impl<T> ModuleField for PhantomData<T> {
    fn register(&self, _: &str, _: &mut Members) {}
}

/// One that may be missing has no members then.
impl<M: Module> Module for Option<M> {
    fn members(&self, members: &mut Members) {
        if let Some(module) = self {
            module.members(members);
        }
    }

    fn sharding(&self) -> Option<Sharding> {
        self.as_ref().and_then(M::sharding)
    }

    fn reset_parameters(&self) -> crate::Result<()> {
        self.as_ref().map_or(Ok(()), M::reset_parameters)
    }
}

macro_rules! the_same {
    ($($type:ty),*) => {
        $(impl<M: Module + ?Sized> Module for $type {
            fn members(&self, members: &mut Members) {
                (**self).members(members);
            }

            fn sharding(&self) -> Option<Sharding> {
                (**self).sharding()
            }

            fn reset_parameters(&self) -> crate::Result<()> {
                (**self).reset_parameters()
            }
        })*
    };
}
the_same!(Box<M>, Rc<M>, &M);

/// Modules in an array, by their numbers.
impl<M: Module, const COUNT: usize> Module for [M; COUNT] {
    fn members(&self, members: &mut Members) {
        self.as_slice().members(members);
    }
}
