//! Kinds of memory.

/// The kind of memory of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Device memory that the library hands out as managed memory, and populates.
    Device,
    /// Device memory that the library maps: the addresses stay, the memory behind them comes and goes.
    Mapped,
    /// Managed memory that the program asked for: the program may want it on the host first.
    Managed,
    /// Plain memory: it counts and cannot be moved.
    Plain,
    /// Plain memory of a pool, which may keep it when it is freed.
    Ordered,
    /// Managed memory of a pool that replaces one of device memory. The driver populates the memory when it hands it out.
    Pooled,
    /// Plain memory that is too small to be worth a wait: it is charged when the lock comes.
    Small,
}

impl Kind {
    /// Whether such memory can be moved.
    #[must_use]
    pub fn is_movable(self) -> bool {
        matches!(self, Self::Device | Self::Mapped | Self::Managed | Self::Pooled)
    }

    /// Whether such memory is the driver's: its functions take the address for that of an allocation.
    #[must_use]
    pub fn is_drivers(self) -> bool {
        self != Self::Mapped
    }

    /// Whether a pool handed such memory out.
    #[must_use]
    pub fn is_pools(self) -> bool {
        matches!(self, Self::Ordered | Self::Pooled)
    }

    /// Whether the program asked for such memory as device memory, and the library made it managed.
    #[must_use]
    pub fn is_in_disguise(self) -> bool {
        matches!(self, Self::Device | Self::Pooled)
    }

    /// Whether such memory is none of the driver's device memory, though the program asked for device memory.
    #[must_use]
    pub fn stands_for_device_memory(self) -> bool {
        self.is_in_disguise() || self == Self::Mapped
    }

    /// Whether such memory has to have its room at once, wherever the lock is.
    #[must_use]
    pub fn needs_room(self) -> bool {
        matches!(self, Self::Plain | Self::Ordered | Self::Pooled)
    }
}
