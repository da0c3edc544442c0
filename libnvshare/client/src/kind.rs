//! Kinds of memory.

/// The kind of memory of an allocation.
///
/// | kind | the program asked for | the memory is | it moves | without room, an allocation |
/// |---|---|---|---|---|
/// | `DeviceAsManaged` | device memory | managed | yes | is absent |
/// | `Mapped` | device memory, or `cuMemCreate` | mapped by the library | yes | is absent |
/// | `ProgramsManaged` | managed memory | managed | yes | is absent |
/// | `ManagedPool` | memory of a pool | managed | yes | waits for its room |
/// | `Plain` | device memory | as asked | no | waits for its room |
/// | `PlainPool` | memory of a pool | as asked | no | waits for its room |
/// | `SmallPlain` | little device memory | as asked | no | is charged later |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The program asked for device memory; the library has made it managed memory, and populates it.
    DeviceAsManaged,
    /// The program asked for device memory; the library maps it: the addresses stay, the memory behind them comes and goes. This kind
    /// alone is none of the driver's: its functions do not take the address for that of an allocation.
    Mapped,
    /// The program asked for managed memory, and may want it on the host first.
    ProgramsManaged,
    /// Plain device memory: it counts and cannot be moved.
    Plain,
    /// Plain memory of a pool, which may keep it when it is freed.
    PlainPool,
    /// Memory of a managed pool, which stands for a pool of device memory. The driver populates the memory when it hands it out.
    ManagedPool,
    /// Plain device memory that is too small to be worth a wait: it is charged when the lock comes.
    SmallPlain,
}

impl Kind {
    /// Whether such memory can be moved.
    #[must_use]
    pub fn is_movable(self) -> bool {
        matches!(self, Self::DeviceAsManaged | Self::Mapped | Self::ProgramsManaged | Self::ManagedPool)
    }

    /// Whether a pool handed such memory out.
    #[must_use]
    pub fn is_pools(self) -> bool {
        matches!(self, Self::PlainPool | Self::ManagedPool)
    }

    /// Whether the program asked for such memory as device memory, and the library made it managed.
    #[must_use]
    pub fn is_in_disguise(self) -> bool {
        matches!(self, Self::DeviceAsManaged | Self::ManagedPool)
    }

    /// Whether such memory has to have its room at once, wherever the lock is.
    #[must_use]
    pub fn needs_room(self) -> bool {
        matches!(self, Self::Plain | Self::PlainPool | Self::ManagedPool)
    }
}
