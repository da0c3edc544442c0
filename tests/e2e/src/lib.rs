//! The tests are in `tests/`: one file a subject. Here is what several of them need.

use std::path::Path;

/// Compares a text with a golden file of `tests/golden`. With `NVSHARE_GOLDEN=write` it writes the file first; the
/// difference in git then shows what a user will see.
///
/// # Panics
/// When they differ.
pub fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("NVSHARE_GOLDEN").is_some_and(|what| what == "write") {
        std::fs::write(&path, text).expect("the golden file can be written");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    if text == golden {
        return;
    }
    let lines = |text: &str| text.lines().chain(["the end"]).map(str::to_owned).collect::<Vec<_>>();
    let pairs = lines(text).into_iter().zip(lines(&golden));
    let (line, (is, was)) = (1..).zip(pairs).find(|(_, (is, was))| is != was).unwrap_or_default();
    panic!(
        "{name}: line {line} is\n  {is}\nand was\n  {was}\nif that is meant: NVSHARE_GOLDEN=write cargo test -p nvshare-e2e"
    );
}
