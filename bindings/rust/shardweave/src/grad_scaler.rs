//! Losses that are scaled, and steps that are skipped.

use shardweave_sys as sys;

use crate::autograd::Mode;
use crate::error::{Of, Result};
use crate::module::Module;
use crate::source::called_here;
use crate::tensor::Tensor;

handle! {
    /// Scales losses so that gradients of 16 bits do not vanish, and tells when they are not finite
    /// (Micikevicius et al., Mixed Precision Training, 2018); torch.amp.GradScaler's numbers.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{AdamW, GradScaler, GradScalerOptions, Module, Tensor};
    ///
    /// let layer = nn::Linear::new(3, 2)?;
    /// let optimizer = AdamW::new(1e-3).build(&layer)?;
    /// let scaler = GradScaler::new(&GradScalerOptions::new().init_scale(1024.0))?;
    /// let loss = layer.forward(&Tensor::ones(&[4, 3])?)?.sum()?;
    /// scaler.scale(&loss)?.backward()?;
    /// layer.finish_grad_sync()?;
    /// if scaler.unscale(&layer)? {
    ///     optimizer.step()?; // on all ranks, or on none
    /// }
    /// scaler.update()?;
    /// optimizer.zero_grad()?;
    /// assert_eq!(scaler.state()?, (1024.0, 1));
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// All ranks call everything alike; their scales are then the same. Neither `Send` nor `Sync`, as
    /// the gradients.
    GradScaler, swv_grad_scaler, swv_grad_scaler_free
}

debug_by_name!(GradScaler);

/// Of [`GradScaler::new`].
#[derive(Clone, Copy, Debug)]
pub struct GradScalerOptions(sys::swv_grad_scaler_options);

impl Default for GradScalerOptions {
    fn default() -> GradScalerOptions {
        GradScalerOptions(sys::SWV_GRAD_SCALER_OPTIONS_INIT)
    }
}

impl GradScalerOptions {
    /// From 65536 on, doubled after 2000 steps without a skip, halved with each.
    pub fn new() -> GradScalerOptions {
        GradScalerOptions::default()
    }

    /// Of the first step.
    pub fn init_scale(mut self, scale: f64) -> GradScalerOptions {
        self.0.init_scale = scale;
        self
    }

    /// What the scale grows by, above 1, after so many steps without a skip.
    pub fn growth(mut self, factor: f64, interval: i64) -> GradScalerOptions {
        (self.0.growth_factor, self.0.growth_interval) = (factor, interval);
        self
    }

    /// What is left of the scale after a skip: above 0, below 1.
    pub fn backoff(mut self, factor: f64) -> GradScalerOptions {
        self.0.backoff_factor = factor;
        self
    }
}

impl GradScaler {
    /// As the options say.
    pub fn new(options: &GradScalerOptions) -> Result<GradScaler> {
        create!(swv_grad_scaler_create(&options.0)).map(GradScaler)
    }

    /// The loss times the scale.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        let mode = Mode::current();
        create!(swv_grad_scaler_scale(self.as_ptr(), loss.as_const_ptr(), mode))
            .map(Tensor::from_handle)
    }

    /// Divides the gradients of a module's parameters by the scale, and says whether all of them are
    /// finite, on all ranks. An error for a parameter that has been unscaled since the last
    /// [`GradScaler::update`], and for a gradient that is still to be synchronized. Collective.
    #[track_caller]
    pub fn unscale(&self, module: &(impl Module + ?Sized)) -> Result<bool> {
        let parameters = module.parameters();
        self.unscale_for(&parameters.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())
            .of("GradScaler::unscale")
    }

    /// The same for some parameters.
    #[track_caller]
    pub fn unscale_for(&self, parameters: &[&Tensor]) -> Result<bool> {
        let _here = called_here();
        let handles: Vec<_> = parameters.iter().map(|tensor| tensor.as_ptr()).collect();
        get!(swv_grad_scaler_unscale(self.as_ptr(), handles.as_ptr(), handles.len()) -> i32)
            .map(|is_finite| is_finite != 0)
            .of("GradScaler::unscale_for")
    }

    /// The scale of the next step: smaller if a gradient was not finite, larger after so many times
    /// in a row where all were. An error if nothing was unscaled.
    pub fn update(&self) -> Result<()> {
        call!(swv_grad_scaler_update(self.as_ptr()))
    }

    /// The scale, and how many updates there were without a skip since it changed: to be saved.
    pub fn state(&self) -> Result<(f64, i64)> {
        let (mut scale, mut tracker) = (0.0, 0);
        call!(swv_grad_scaler_state(self.as_ptr(), &mut scale, &mut tracker))?;
        Ok((scale, tracker))
    }

    /// To resume.
    pub fn set_state(&self, scale: f64, growth_tracker: i64) -> Result<()> {
        call!(swv_grad_scaler_set_state(self.as_ptr(), scale, growth_tracker))
    }
}
