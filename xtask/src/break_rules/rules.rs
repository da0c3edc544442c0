//! The list of rules, as `xtask/rules` has it, and the rules that random programs have to notice as well.

use std::sync::OnceLock;

/// A rule, how it is broken, and the test that must notice.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) what: &'static str,
    pub(super) file: &'static str,
    /// A text that the file has once.
    pub(super) from: String,
    /// `BROKEN` stands for an expression: whether this rule is the broken one. If it is not, this text does what `from`
    /// does.
    pub(super) to: String,
    pub(super) package: &'static str,
    pub(super) test: &'static str,
}

/// The files of rules, all of those in `xtask/rules`; [`parse`] says what they look like.
pub(super) const LISTS: [&str; 11] = [
    include_str!("../../rules/library.rules"),
    include_str!("../../rules/stream-order.rules"),
    include_str!("../../rules/sleep.rules"),
    include_str!("../../rules/door.rules"),
    include_str!("../../rules/gone.rules"),
    include_str!("../../rules/driver.rules"),
    include_str!("../../rules/scheduler.rules"),
    include_str!("../../rules/shares.rules"),
    include_str!("../../rules/seats.rules"),
    include_str!("../../rules/claims.rules"),
    include_str!("../../rules/sharing.rules"),
];

/// All rules.
///
/// # Panics
/// When a file of rules cannot be read; the tests of this program see that.
pub(super) fn all() -> &'static [Rule] {
    static ALL: OnceLock<Vec<Rule>> = OnceLock::new();
    ALL.get_or_init(|| {
        let rules = LISTS.iter().flat_map(|list| parse(list));
        rules.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Reads a file of rules. A rule is a block of lines, and an empty line ends it:
///
/// ```text
/// rule    a sentence that says what holds
/// file    the source file, from the workspace's folder
/// test    the package of the test, and the test that goes red
/// - a line of the source; where the rule is in a part of a line, that part
/// + what stands there instead
/// ```
///
/// Behind the sign and a blank, lines are as in the source.
fn parse(list: &'static str) -> impl Iterator<Item = Result<Rule, String>> {
    let blocks = list.split("\n\n").map(|block| block.trim_matches('\n'));
    blocks.filter(|block| !block.is_empty()).map(rule)
}

fn rule(block: &'static str) -> Result<Rule, String> {
    let field = |name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(str::trim).ok_or_else(|| format!("a rule has no line `{name}`:\n{block}"))
    };
    let (package, test) = field("test")?
        .split_once(' ')
        .ok_or_else(|| format!("a rule names no package, or no test:\n{block}"))?;
    let text = |sign: &str| {
        let lines = block.lines().filter_map(|line| line.strip_prefix(sign));
        lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
    };
    let (from, to) = (text("-"), text("+"));
    if from.is_empty() || !to.contains("BROKEN") {
        return Err(format!("a rule says not what is broken, or not how:\n{block}"));
    }
    Ok(Rule { what: field("rule")?, file: field("file")?, from, to, package, test })
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
