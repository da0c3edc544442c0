//! Columns for a terminal of any width.

use std::env;
use std::io::{self, IsTerminal};

/// A column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) head: &'static str,
    pub(crate) kind: Kind,
    /// Shown with `--wide` only; or if a row has another value than the usual one, where there is one.
    pub(crate) wide: bool,
    usual: Option<&'static str>,
}

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To the left.
    Text,
    /// To the right.
    Number,
    /// To the left, and cut short if the line would be too long.
    Cut,
}

impl Column {
    pub(crate) const fn text(head: &'static str) -> Self {
        Self { head, kind: Kind::Text, wide: false, usual: None }
    }

    pub(crate) const fn number(head: &'static str) -> Self {
        Self { head, kind: Kind::Number, wide: false, usual: None }
    }

    pub(crate) const fn cut(head: &'static str) -> Self {
        Self { head, kind: Kind::Cut, wide: false, usual: None }
    }

    pub(crate) const fn wide(self) -> Self {
        Self { wide: true, ..self }
    }

    /// A column that is worth its place if a row has another value than this one.
    pub(crate) const fn wide_if_all_are(self, usual: &'static str) -> Self {
        Self { wide: true, usual: Some(usual), ..self }
    }
}

/// The layout of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// All columns, and nothing is cut.
    pub(crate) wide: bool,
    /// Longest line.
    pub(crate) width: usize,
}

impl Layout {
    /// The layout for standard output.
    pub(crate) fn of_output(wide: bool) -> Self {
        // As in `ps`: a file or a program takes lines of any length.
        let named = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let terminal = || terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        let width = match (named, io::stdout().is_terminal()) {
            (Some(width), _) => width,
            (None, true) => terminal().unwrap_or(80),
            (None, false) => usize::MAX,
        };
        Self { wide, width: if wide || width == 0 { usize::MAX } else { width } }
    }
}

/// The least width of a cut column. If there is less, the table becomes a list.
const MIN_CUT: usize = 8;
/// The text of a row without a value.
pub(crate) const NOTHING: &str = "-";

/// Sets rows under their heads, each column as wide as its values; or each row as a list, if the lines would still be
/// too long. A column without any value is left out. Each row has a cell for each column.
pub(crate) fn render(columns: &[Column], rows: &[Vec<String>], layout: Layout) -> String {
    debug_assert!(rows.iter().all(|row| row.len() == columns.len()), "a cell for each column");
    let says = |i: usize| rows.iter().any(|row| row[i] != NOTHING);
    let is_unusual = |i: usize, usual: &str| rows.iter().any(|row| row[i] != usual && row[i] != NOTHING);
    let is_in_place = |i: usize| {
        layout.wide || !columns[i].wide || columns[i].usual.is_some_and(|usual| is_unusual(i, usual))
    };
    let shown: Vec<usize> = (0..columns.len()).filter(|&i| is_in_place(i) && (says(i) || i == 0)).collect();
    let mut widths: Vec<usize> = shown
        .iter()
        .map(|&i| rows.iter().map(|row| length(&row[i])).chain([length(columns[i].head)]).max().unwrap_or(0))
        .collect();
    let gaps = 2 * widths.len().saturating_sub(1);
    let whole = widths.iter().sum::<usize>() + gaps;
    if whole > layout.width {
        let cut = shown.iter().position(|&i| columns[i].kind == Kind::Cut);
        let others = whole - cut.map_or(0, |cut| widths[cut]);
        match cut {
            Some(cut) if others + MIN_CUT <= layout.width => widths[cut] = layout.width - others,
            _ => return list(columns, &shown, rows, layout.width),
        }
    }
    let line = |cell_of: &dyn Fn(usize) -> String| {
        let set = shown.iter().zip(&widths).map(|(&i, &width)| {
            let cell = shorten(&cell_of(i), width);
            if columns[i].kind == Kind::Number {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        });
        set.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let head = line(&|i| columns[i].head.to_owned());
    rows.iter().fold(head, |text, row| text + &line(&|i| row[i].clone()))
}

/// Each row as lines, each with a head and a value.
fn list(columns: &[Column], shown: &[usize], rows: &[Vec<String>], width: usize) -> String {
    let row = |row: &Vec<String>| {
        let said = shown.iter().map(|&i| (columns[i].head, &row[i])).filter(|(_, cell)| *cell != NOTHING);
        said.map(|(head, cell)| shorten(&format!("{head} {cell}"), width.max(16)) + "\n").collect::<String>()
    };
    rows.iter().map(row).collect::<Vec<_>>().join("\n")
}

fn length(text: &str) -> usize {
    text.chars().count()
}

fn shorten(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] =
        [Column::text("ID"), Column::number("SIZE"), Column::text("MORE").wide(), Column::cut("COMMAND")];

    fn rows() -> Vec<Vec<String>> {
        [["1", "9", "x", "python3 train.py --long"], ["22", "10", "-", "sh"]]
            .map(|row| row.map(str::to_owned).to_vec())
            .to_vec()
    }

    fn at(wide: bool, width: usize) -> String {
        render(&COLUMNS, &rows(), Layout { wide, width })
    }

    #[test]
    fn tables_of_every_width() {
        assert_eq!(at(false, 80), "ID  SIZE  COMMAND\n1      9  python3 train.py --long\n22    10  sh\n");
        assert_eq!(at(false, 20), "ID  SIZE  COMMAND\n1      9  python3 t…\n22    10  sh\n");
        assert_eq!(at(true, usize::MAX).lines().nth(1), Some("1      9  x     python3 train.py --long"));
        assert_eq!(at(false, 10), "ID 1\nSIZE 9\nCOMMAND python3…\n\nID 22\nSIZE 10\nCOMMAND sh\n");
    }

    #[test]
    fn a_wide_column_is_shown_where_a_value_is_unusual() {
        let columns = [Column::text("ID"), Column::number("WEIGHT").wide_if_all_are("100")];
        let table = |weights: [&str; 2]| {
            let rows = weights.map(|weight| vec!["1".to_owned(), weight.to_owned()]);
            render(&columns, &rows, Layout { wide: false, width: 80 })
        };
        assert_eq!(table(["100", "100"]), "ID\n1\n1\n");
        assert_eq!(table(["100", "300"]), "ID  WEIGHT\n1      100\n1      300\n");
    }

    #[test]
    fn no_line_is_longer_than_the_terminal() {
        for width in 16..60 {
            assert!(
                at(false, width).lines().all(|line| length(line) <= width),
                "{width}\n{}",
                at(false, width)
            );
        }
    }

    #[test]
    fn a_column_that_says_nothing_is_left_out() {
        let rows = vec![vec!["1".to_owned(), NOTHING.to_owned(), NOTHING.to_owned(), "sh".to_owned()]];
        assert_eq!(render(&COLUMNS, &rows, Layout { wide: true, width: 80 }), "ID  COMMAND\n1   sh\n");
    }
}
