//! `#[derive(Module)]` for the crate `shardweave`, which has its documentation: use it from there.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    parse_macro_input, parse_quote, Attribute, Data, DeriveInput, Error, Field, Fields, LitStr,
    Path, Result, Token, Variant,
};

/// Implements the trait `Module`: the fields of a struct are its members, by their names ("norm.weight",
/// "layers.0.weight"), those of a tuple by their numbers. Of an enum the variant that a value is has its
/// fields; a variant that wraps one value has what that has. What a field may be the trait `ModuleField`
/// says; another type is an error of the compiler at that field. Attributes of fields:
///
/// - `#[module(skip)]`: no member;
/// - `#[module(buffer)]`: tensors that training does not change, in place of parameters;
///   `#[module(buffer, non_persistent)]`: those that no checkpoint has;
/// - `#[module(name = "c_attn")]`: by another name.
///
/// And of the type: `#[module(reset = Self::draw)]` names the function of `&self`, a
/// `shardweave::Result<()>`, that `Module::initialize` calls after those of the modules inside;
/// `#[module(sharding = Self::rows)]` the one of `&self`, a `shardweave::Sharding`, that says how it
/// shards (`Module::sharding`).
///
/// ```ignore
/// #[derive(shardweave::Module)]
/// struct Block {
///     norm: nn::LayerNorm,
///     layers: Vec<nn::Linear>,
///     gate: Option<nn::Linear>,
///     scale: Tensor,
///     #[module(buffer)]
///     index: Tensor,
///     heads: i64, // numbers are no members
///     #[module(skip)]
///     cache: RefCell<Vec<Tensor>>,
/// }
/// ```
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implement(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn implement(input: &DeriveInput) -> Result<TokenStream> {
    let functions = functions_of(&input.attrs)?;
    let reset = functions.reset.map(|function| {
        quote! {
            fn reset_parameters(&self) -> ::shardweave::Result<()> {
                (#function)(self)
            }
        }
    });
    let sharding = functions.sharding.map(|function| {
        quote! {
            fn sharding(&self) -> ::core::option::Option<::shardweave::Sharding> {
                ::core::option::Option::Some((#function)(self))
            }
        }
    });
    let body = match &input.data {
        Data::Struct(data) => {
            let lines = lines(&data.fields, |place, name| match name {
                Some(name) => quote!(&self.#name),
                None => {
                    let place = syn::Index::from(place);
                    quote!(&self.#place)
                }
            })?;
            quote!(#(#lines)*)
        }
        Data::Enum(data) => {
            let arms = data.variants.iter().map(arm).collect::<Result<Vec<_>>>()?;
            if arms.is_empty() {
                return Err(Error::new(
                    input.ident.span(),
                    "derive(Module): an enum without variants; wanted one with some",
                ));
            }
            quote!(match self { #(#arms)* })
        }
        Data::Union(data) => {
            return Err(Error::new(
                data.union_token.span,
                "derive(Module): a union; wanted a struct or an enum",
            ))
        }
    };
    let mut generics = input.generics.clone();
    let types: Vec<_> = generics.type_params().map(|parameter| parameter.ident.clone()).collect();
    for name in types {
        let bound = parse_quote!(#name: ::shardweave::ModuleField);
        generics.make_where_clause().predicates.push(bound);
    }
    let (name, (parameters, arguments, conditions)) = (&input.ident, generics.split_for_impl());
    Ok(quote! {
        #[automatically_derived]
        impl #parameters ::shardweave::Module for #name #arguments #conditions {
            #[allow(unused_variables)]
            fn members(&self, members: &mut ::shardweave::Members) {
                #body
            }
            #reset
            #sharding
        }
    })
}

/// What a variant has; of one that only wraps a value, what that has.
fn arm(variant: &Variant) -> Result<TokenStream> {
    if !variant.attrs.iter().all(|attribute| !attribute.path().is_ident("module")) {
        return Err(Error::new(
            variant.span(),
            "derive(Module): #[module(...)] of a variant; wanted it at a field",
        ));
    }
    let name = &variant.ident;
    let bound = |place: usize| format_ident!("field{}", place);
    if let Fields::Unnamed(fields) = &variant.fields {
        if fields.unnamed.len() == 1 {
            let field = &fields.unnamed[0];
            let what = FieldOptions::of(field)?;
            if what.is_default() {
                let field = quote_spanned! {field.ty.span()=>
                    members.wrapped(inner);
                };
                return Ok(quote!(Self::#name(inner) => { #field }));
            }
        }
    }
    let lines = lines(&variant.fields, |place, _| {
        let name = bound(place);
        quote!(#name)
    })?;
    let names: Vec<_> = (0..variant.fields.len()).map(bound).collect();
    Ok(match &variant.fields {
        Fields::Named(fields) => {
            let fields = fields.named.iter().map(|field| &field.ident);
            quote!(Self::#name { #(#fields: #names),* } => { #(#lines)* })
        }
        Fields::Unnamed(_) => quote!(Self::#name(#(#names),*) => { #(#lines)* }),
        Fields::Unit => quote!(Self::#name => {}),
    })
}

/// A line for each field that is not skipped.
fn lines(
    fields: &Fields,
    reference: impl Fn(usize, Option<&syn::Ident>) -> TokenStream,
) -> Result<Vec<TokenStream>> {
    let mut lines = Vec::new();
    let mut names: Vec<String> = Vec::new();
    for (place, field) in fields.iter().enumerate() {
        let options = FieldOptions::of(field)?;
        if options.skip {
            continue;
        }
        let name = match (options.name, &field.ident) {
            (Some(name), _) => name.value(),
            (None, Some(name)) => syn::ext::IdentExt::unraw(name).to_string(),
            (None, None) => place.to_string(),
        };
        if names.contains(&name) {
            return Err(Error::new(
                field.span(),
                format!("derive(Module): two fields have the name '{name}'; wanted two names"),
            ));
        }
        let value = reference(place, field.ident.as_ref());
        // Where the type does not fit, the compiler shows the field.
        lines.push(match (options.buffer, options.non_persistent) {
            (false, _) => quote_spanned! {field.ty.span()=>
                ::shardweave::ModuleField::register(#value, #name, members);
            },
            (true, non_persistent) => quote_spanned! {field.ty.span()=>
                ::shardweave::BufferField::register_buffer(#value, #name, !#non_persistent, members);
            },
        });
        names.push(name);
    }
    Ok(lines)
}

/// `#[module(skip)]`, `#[module(buffer)]`, `#[module(buffer, non_persistent)]`, `#[module(name = "...")]`.
#[derive(Default)]
struct FieldOptions {
    skip: bool,
    buffer: bool,
    non_persistent: bool,
    name: Option<LitStr>,
}

impl FieldOptions {
    fn of(field: &Field) -> Result<FieldOptions> {
        let mut options = FieldOptions::default();
        let mut place: Option<Span> = None;
        for attribute in field.attrs.iter().filter(|a| a.path().is_ident("module")) {
            attribute.parse_nested_meta(|meta| {
                place = Some(meta.path.span());
                let flag = |flag: &mut bool| {
                    if std::mem::replace(flag, true) {
                        return Err(meta.error("derive(Module): it is there twice"));
                    }
                    Ok(())
                };
                if meta.path.is_ident("skip") {
                    flag(&mut options.skip)
                } else if meta.path.is_ident("buffer") {
                    flag(&mut options.buffer)
                } else if meta.path.is_ident("non_persistent") {
                    flag(&mut options.non_persistent)
                } else if meta.path.is_ident("name") {
                    let name: LitStr = meta.value()?.parse()?;
                    if name.value().is_empty() || name.value().contains('.') {
                        return Err(Error::new(
                            name.span(),
                            "derive(Module): wanted a name without '.', which is not empty",
                        ));
                    }
                    options.name = Some(name);
                    Ok(())
                } else {
                    Err(meta.error(
                        "derive(Module): wanted skip, buffer, non_persistent or name = \"...\"",
                    ))
                }
            })?;
        }
        let wrong = |what| Err(Error::new(place.unwrap_or_else(Span::call_site), what));
        if options.skip && (options.buffer || options.non_persistent || options.name.is_some()) {
            return wrong("derive(Module): skip stands alone: the field is no member");
        }
        if options.non_persistent && !options.buffer {
            return wrong("derive(Module): non_persistent goes with buffer");
        }
        Ok(options)
    }

    fn is_default(&self) -> bool {
        !self.skip && !self.buffer && self.name.is_none()
    }
}

/// What `#[module(...)]` of the type names.
#[derive(Default)]
struct Functions {
    reset: Option<Path>,
    sharding: Option<Path>,
}

fn functions_of(attributes: &[Attribute]) -> Result<Functions> {
    let mut functions = Functions::default();
    for attribute in attributes.iter().filter(|a| a.path().is_ident("module")) {
        let metas =
            attribute.parse_args_with(Punctuated::<syn::Meta, Token![,]>::parse_terminated)?;
        for meta in metas {
            let path = meta.path().clone();
            let function = if path.is_ident("reset") {
                &mut functions.reset
            } else if path.is_ident("sharding") {
                &mut functions.sharding
            } else {
                return Err(Error::new(
                    meta.span(),
                    "derive(Module): wanted reset = FUNCTION or sharding = FUNCTION here; skip, \
                     buffer and name stand at fields",
                ));
            };
            match &meta {
                syn::Meta::NameValue(syn::MetaNameValue {
                    value: syn::Expr::Path(path), ..
                }) if function.is_none() => *function = Some(path.path.clone()),
                other => {
                    return Err(Error::new(
                        other.span(),
                        "derive(Module): wanted one FUNCTION of &self here, as reset = Self::draw",
                    ))
                }
            }
        }
    }
    Ok(functions)
}
