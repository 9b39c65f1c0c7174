use std::fmt;

use shardweave_sys as sys;

use crate::names;

/// What kind of error it is; the numbers of google.rpc.Code, which the C interface uses too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Code {
    /// Somebody gave up.
    Cancelled = sys::SWV_CODE_CANCELLED,
    /// None of the others.
    Unknown = sys::SWV_CODE_UNKNOWN,
    /// An argument is wrong in itself.
    InvalidArgument = sys::SWV_CODE_INVALID_ARGUMENT,
    /// A rank did not come in time; the message names it.
    DeadlineExceeded = sys::SWV_CODE_DEADLINE_EXCEEDED,
    /// There is no such thing; the message suggests names that are nearly the same.
    NotFound = sys::SWV_CODE_NOT_FOUND,
    /// There is such a thing already.
    AlreadyExists = sys::SWV_CODE_ALREADY_EXISTS,
    /// Not allowed.
    PermissionDenied = sys::SWV_CODE_PERMISSION_DENIED,
    /// Memory, threads.
    ResourceExhausted = sys::SWV_CODE_RESOURCE_EXHAUSTED,
    /// Not now, not in this state; also: ranks called different things.
    FailedPrecondition = sys::SWV_CODE_FAILED_PRECONDITION,
    /// A rank failed, or gave up.
    Aborted = sys::SWV_CODE_ABORTED,
    /// An index beyond the end.
    OutOfRange = sys::SWV_CODE_OUT_OF_RANGE,
    /// Not offered here.
    Unimplemented = sys::SWV_CODE_UNIMPLEMENTED,
    /// A bug, or an error of LibTorch that is none of the others.
    Internal = sys::SWV_CODE_INTERNAL,
    /// A rank is gone, a server does not answer.
    Unavailable = sys::SWV_CODE_UNAVAILABLE,
    /// Data is lost or damaged.
    DataLoss = sys::SWV_CODE_DATA_LOSS,
    /// Nobody knows who you are.
    Unauthenticated = sys::SWV_CODE_UNAUTHENTICATED,
}

impl Code {
    pub(crate) const ALL: [Code; 16] = [
        Code::Cancelled,
        Code::Unknown,
        Code::InvalidArgument,
        Code::DeadlineExceeded,
        Code::NotFound,
        Code::AlreadyExists,
        Code::PermissionDenied,
        Code::ResourceExhausted,
        Code::FailedPrecondition,
        Code::Aborted,
        Code::OutOfRange,
        Code::Unimplemented,
        Code::Internal,
        Code::Unavailable,
        Code::DataLoss,
        Code::Unauthenticated,
    ];

    pub(crate) fn from_number(number: i32) -> Code {
        Code::ALL.into_iter().find(|code| *code as i32 == number).unwrap_or(Code::Unknown)
    }
}

/// An error: what kind, and what was given, what was wanted and where.
///
/// ```
/// use shardweave::{Code, Layout};
/// let error = Layout::parse("[S(0), Q]").unwrap_err();
/// assert_eq!(error.code(), Code::InvalidArgument);
/// assert!(error.message().starts_with("Layout::parse: "));
/// ```
///
/// A program whose `main` returns it says the message: `Debug` is as `Display`.
/// Errors of one code and one message are equal.
#[derive(Clone)]
pub struct Error {
    code: Code,
    message: String,
    rank: Option<usize>,
}

/// What fallible functions here return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// [`Error::of`] for results.
pub(crate) trait Of {
    fn of(self, function: &str) -> Self;
}

impl<T> Of for Result<T> {
    #[inline]
    fn of(self, function: &str) -> Result<T> {
        self.map_err(|error| error.of(function))
    }
}

impl Error {
    /// An error of the caller's own, for the body of a rank or a callback.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), rank: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::new(Code::InvalidArgument, message)
    }

    /// The library has said a number that this crate has no name for: it is of a newer version.
    #[cold]
    pub(crate) fn newer_library(what: &str, number: i32) -> Error {
        let version = env!("CARGO_PKG_VERSION");
        Error::new(
            Code::Unimplemented,
            format!("{what} {number} is none that the crate shardweave {version} knows"),
        )
    }

    /// The kind.
    pub fn code(&self) -> Code {
        self.code
    }

    /// What was given, what was wanted and where.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The rank of the world that failed, where the error is another rank's, or one of
    /// [`Threads::run`](crate::Threads::run) or [`Spawn::run`](crate::Spawn::run); None: this rank's
    /// own error, or not known.
    ///
    /// ```
    /// use shardweave::{Code, Error, World};
    /// let error = World::threads(3)
    ///     .run(|world| {
    ///         if world.rank() == 1 {
    ///             return Err(Error::new(Code::DataLoss, "gone bad"));
    ///         }
    ///         let error = world.comm()?.barrier().unwrap_err();
    ///         assert_eq!(error.rank(), Some(1)); // whose error it is
    ///         Err::<(), _>(error)
    ///     })
    ///     .unwrap_err();
    /// assert_eq!((error.code(), error.rank()), (Code::DataLoss, Some(1)));
    /// ```
    pub fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// The same error, of this rank.
    pub(crate) fn of_rank(mut self, rank: usize) -> Error {
        self.rank = Some(rank);
        self
    }

    /// The same error of `function`, which the user has called: its name takes the place of that
    /// of the function of this crate that failed inside, or comes first.
    #[cold]
    pub(crate) fn of(mut self, function: &str) -> Error {
        let rest = match self.message.split_once(": ") {
            Some((inner, rest)) if names::is_function(inner) => rest,
            _ => &self.message,
        };
        self.message = format!("{function}: {rest}");
        self
    }

    /// The same error with `what` in front of the message.
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error { message: format!("{what}: {}", self.message), ..self }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.code)
    }
}

/// As `Display`: what `main` and `unwrap` show.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl PartialEq for Error {
    fn eq(&self, other: &Error) -> bool {
        (self.code, &self.message) == (other.code, &other.message)
    }
}

impl Eq for Error {}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        use std::io::ErrorKind;
        let code = match error.kind() {
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::PermissionDenied => Code::PermissionDenied,
            ErrorKind::AlreadyExists => Code::AlreadyExists,
            ErrorKind::InvalidInput => Code::InvalidArgument,
            ErrorKind::TimedOut => Code::DeadlineExceeded,
            ErrorKind::OutOfMemory => Code::ResourceExhausted,
            _ => Code::Unknown,
        };
        Error::new(code, error.to_string())
    }
}
