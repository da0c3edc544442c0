//! What the list says of a rule, and the rules that random programs have to notice as well.

/// A rule, how it is broken, and the test that must notice.
pub(super) struct Rule {
    pub(super) what: &'static str,
    pub(super) file: &'static str,
    pub(super) from: &'static str,
    /// `BROKEN` stands for an expression: whether this rule is the broken one. If it is not, this text does what `from`
    /// does.
    pub(super) to: &'static str,
    pub(super) package: &'static str,
    pub(super) test: &'static str,
}

/// Rules that random programs have to notice as well.
pub(super) struct Storm {
    /// The defect that the broken rule would be.
    pub(super) defect: &'static str,
    /// The beginning of the rule's text.
    pub(super) rule: &'static str,
    /// How the programs are run.
    pub(super) arguments: &'static [&'static str],
}

pub(super) const STORM: &[Storm] = &[
    Storm {
        defect: "a handle is used after its end",
        rule: "a handle of the program is used",
        arguments: &[],
    },
    Storm {
        defect: "a drain leaves a barrier on the legacy stream",
        rule: "a look at a context is no barrier",
        arguments: &[],
    },
    Storm {
        defect: "a thread's own stream in a second context is not drained",
        rule: "a drain looks at every context",
        arguments: &[],
    },
    Storm {
        defect: "an event that cannot be had counts as complete",
        rule: "a look at a context that fails",
        arguments: &[],
    },
    Storm {
        defect: "EVICT and SCHED_OFF read at once open the gate while memory leaves",
        rule: "the gate opens only when no memory",
        arguments: &["--chaos"],
    },
    Storm {
        defect: "an allocation that the lock overtakes is on the card uncharged",
        rule: "an allocation that the lock overtakes",
        // Those that meet slow allocations.
        arguments: &["--first", "6", "--every", "8"],
    },
];
