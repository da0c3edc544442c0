//! What an allocation is made of.

/// What an allocation is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Device memory that we hand out as managed memory, and populate.
    Device,
    /// Device memory that we map ourselves: its addresses stay, the memory behind them comes and goes as a whole.
    Mapped,
    /// Managed memory that the program asked for: it may want it on the host first.
    Managed,
    /// The driver's own device memory: it counts and cannot be moved.
    Plain,
    /// The same, of a pool, which may keep it when it is freed.
    Ordered,
    /// Managed memory of a pool that stands for one of device memory. The driver populates it when it hands it out.
    Pooled,
    /// The driver's own device memory, too small to be worth a wait: it is charged when the lock comes.
    Small,
}

impl Kind {
    /// Whether it can be moved.
    #[must_use]
    pub fn is_movable(self) -> bool {
        matches!(self, Self::Device | Self::Mapped | Self::Managed | Self::Pooled)
    }

    /// Whether a pool handed it out.
    #[must_use]
    pub fn is_pools(self) -> bool {
        matches!(self, Self::Ordered | Self::Pooled)
    }

    /// Whether it was asked for as device memory and is managed.
    #[must_use]
    pub fn is_in_disguise(self) -> bool {
        matches!(self, Self::Device | Self::Pooled)
    }

    /// Whether it has to have its room at once, wherever the lock is.
    #[must_use]
    pub fn needs_room(self) -> bool {
        matches!(self, Self::Plain | Self::Ordered | Self::Pooled)
    }
}
