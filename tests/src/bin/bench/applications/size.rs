//! The amount of work.

/// The amount of a job's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The amount for figures.
    Usual,
    /// Just enough to show that everything works. The benchmark waits for nothing, so the figures mean nothing.
    Smallest,
}

impl Size {
    /// The number that applies to this size.
    pub const fn of(self, usual: u64, smallest: u64) -> u64 {
        match self {
            Self::Usual => usual,
            Self::Smallest => smallest,
        }
    }
}
