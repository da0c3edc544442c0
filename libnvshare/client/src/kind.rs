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

/// The request of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wishes {
    Device,
    Managed,
    Pool,
}

/// The nature of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    AsAsked,
    Managed,
    Mapped,
}

/// The fate of an allocation that has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WithoutRoom {
    IsAbsent,
    Waits,
    IsChargedLater,
}

impl Kind {
    /// The row of the table.
    const fn row(self) -> (Wishes, Made, WithoutRoom) {
        match self {
            Self::DeviceAsManaged => (Wishes::Device, Made::Managed, WithoutRoom::IsAbsent),
            Self::Mapped => (Wishes::Device, Made::Mapped, WithoutRoom::IsAbsent),
            Self::ProgramsManaged => (Wishes::Managed, Made::Managed, WithoutRoom::IsAbsent),
            Self::ManagedPool => (Wishes::Pool, Made::Managed, WithoutRoom::Waits),
            Self::Plain => (Wishes::Device, Made::AsAsked, WithoutRoom::Waits),
            Self::PlainPool => (Wishes::Pool, Made::AsAsked, WithoutRoom::Waits),
            Self::SmallPlain => (Wishes::Device, Made::AsAsked, WithoutRoom::IsChargedLater),
        }
    }

    /// Whether such memory can be moved.
    #[must_use]
    pub fn is_movable(self) -> bool {
        self.row().1 != Made::AsAsked
    }

    /// Whether a pool handed such memory out.
    #[must_use]
    pub fn is_pools(self) -> bool {
        self.row().0 == Wishes::Pool
    }

    /// Whether the program asked for such memory as device memory, and the library made it managed.
    #[must_use]
    pub fn is_in_disguise(self) -> bool {
        let (asked, made, _) = self.row();
        asked != Wishes::Managed && made == Made::Managed
    }

    /// Whether such memory has to have its room at once, wherever the lock is.
    #[must_use]
    pub fn needs_room(self) -> bool {
        self.row().2 == WithoutRoom::Waits
    }
}
