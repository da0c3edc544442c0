//! The tree as a reader finds it: small files, comments of plain sentences, an ARCHITECTURE.md that names what is there, and
//! documents whose links lead somewhere.

#[path = "../src/shipped.rs"]
mod shipped;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A source file has fewer lines.
const MAX_LINES: usize = 600;
/// README.md has at most this many lines.
const MAX_LINES_OF_README: usize = 200;
/// A cell of a table has at most this many characters, two lines.
const MAX_CELL: usize = 200;
/// A sentence of a document, or of a comment, has at most this many words.
const MAX_WORDS: usize = 25;
/// A walk through the code has at most this many steps.
const MAX_STEPS: usize = 10;
/// The walks of ARCHITECTURE.md, by their headings.
const WALKS: [&str; 4] = ["### A launch", "### An allocation", "### A hand-over", "### `set-tq`"];

/// Folders whose comments are as plain as documents.
const PLAIN: [&str; 2] = ["libnvshare/src", "libnvshare/client/src"];
/// Folders whose comments tell subjects and numbers, though a sentence may be long.
const TOLD: [&str; 8] = [
    "libnvshare",
    "nvshare-admin",
    "nvshare-ctl",
    "nvshare-device-plugin",
    "nvshare-scheduler",
    "proto",
    "tests",
    "xtask",
];

const LONG: &str = "a long sentence";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files and folders below `dir`, from the root of the tree; build outputs and other hidden folders left out.
fn walk(dir: &Path, root: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        let is_folder = entry.file_type().unwrap().is_dir();
        let is_hidden = name.to_string_lossy().starts_with('.') && name != ".ci" && name != ".cargo";
        if is_folder && (is_hidden || name == "target" || name == "dist" || name == "node_modules") {
            continue;
        }
        found.push(path.strip_prefix(root).unwrap().to_owned());
        if is_folder {
            walk(&path, root, found);
        }
    }
}

fn tree() -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(&root(), &root(), &mut found);
    found
}

/// The text between backticks in a line, and what follows each up to the next.
fn quoted(line: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = line.split('`').collect();
    parts.get(1..).unwrap_or_default().chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

/// Whether a quoted text is meant as a file or folder of the tree.
fn is_path(text: &str) -> bool {
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let ends = [".rs", ".md", ".py", ".c", ".cu", ".cpp", ".toml", "/"];
    is_plain && !text.starts_with('/') && ends.iter().any(|end| text.ends_with(end))
}

/// The files and folders that a path of the document means: it may leave out the beginning.
fn meant<'a>(path: &str, tree: &'a [PathBuf]) -> Vec<&'a PathBuf> {
    tree.iter().filter(|known| known.ends_with(path.trim_end_matches('/'))).collect()
}

/// Names of a document that the tree does not have, with the lines.
fn missing(document: &str, tree: &[PathBuf], read: impl Fn(&Path) -> String) -> Vec<String> {
    let mut missing = Vec::new();
    let mut is_picture = false;
    for (number, line) in (1..).zip(document.lines()) {
        is_picture ^= line.starts_with("```");
        if is_picture {
            continue;
        }
        let quoted = quoted(line);
        for (at, (text, then)) in quoted.iter().enumerate() {
            if !is_path(text) {
                continue;
            }
            let files = meant(text, tree);
            if files.is_empty() {
                missing.push(format!("{number}: there is no {text}"));
                continue;
            }
            // "`file.rs`, `function`"
            let next = quoted.get(at + 1).map(|(next, _)| *next).filter(|_| *then == ", ");
            let is_function = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            if let Some(function) = next.filter(|_| text.ends_with(".rs")).filter(is_function) {
                let has = |file: &&PathBuf| read(file).contains(&format!("fn {function}"));
                if !files.iter().any(has) {
                    missing.push(format!("{number}: there is no fn {function} in {text}"));
                }
            }
        }
    }
    missing
}

/// The steps of a walk: the numbered lines behind its heading.
fn steps<'a>(document: &'a str, heading: &str) -> Vec<&'a str> {
    let is_step = |line: &&str| line.split_once(". ").is_some_and(|(number, _)| number.parse::<u8>().is_ok());
    let behind = document.lines().skip_while(|line| *line != heading).skip(1);
    behind.take_while(|line| !line.starts_with('#')).filter(is_step).collect()
}

#[test]
fn every_source_file_is_small() {
    let sources: Vec<_> =
        tree().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs")).collect();
    assert!(sources.len() > 100, "only {} sources were found", sources.len());
    let lines = |path: &PathBuf| fs::read_to_string(root().join(path)).unwrap().lines().count();
    let large = sources.into_iter().map(|path| (lines(&path), path)).filter(|(lines, _)| *lines >= MAX_LINES);
    let large: Vec<_> = large.collect();
    assert!(large.is_empty(), "{large:?}");
}

/// Functions whose names ask a question and whose signatures give no answer to it, neither `bool` nor a type of it, or change what
/// they are asked of.
fn questions_without_answers(source: &str) -> Vec<&str> {
    let functions = source.split("fn ").skip(1).filter(|text| {
        let name = text.split(['(', '<']).next().unwrap_or_default();
        ["is_", "has_", "may_"].iter().any(|begin| name.starts_with(begin))
            && text.starts_with(&format!("{name}("))
    });
    let unanswered = functions.filter(|text| {
        let signature =
            text.split(" {").next().unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let answers =
            signature.ends_with("bool") || signature.ends_with("bool>") || signature.contains("Result<bool,");
        !answers || signature.contains("(&mut self")
    });
    unanswered.map(|text| text.split('(').next().unwrap_or_default()).collect()
}

#[test]
fn names_that_ask_are_those_of_answers() {
    let asks = "fn is_next(&mut self, unit: &Unit) {\n}\nfn is_it(&self) -> bool {\n}\nfn has_it() -> Option<bool>;\nfn has_come(&mut self) -> bool;\n";
    assert_eq!(questions_without_answers(asks), ["is_next", "has_come"]);
    let own = root().join("xtask/tests/tree.rs");
    let sources = tree().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    for path in sources.map(|path| root().join(path)).filter(|path| *path != own) {
        let source = fs::read_to_string(&path).unwrap();
        assert_eq!(questions_without_answers(&source), [""; 0], "{}", path.display());
    }
}

#[test]
fn the_architecture_names_what_is_there() {
    let document = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let missing = missing(&document, &tree(), |file| fs::read_to_string(root().join(file)).unwrap());
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

#[test]
fn the_walks_are_short_and_each_step_is_in_a_file() {
    let document = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for heading in WALKS {
        let steps = steps(&document, heading);
        assert!((5..=MAX_STEPS).contains(&steps.len()), "{heading}: {} steps", steps.len());
        for step in steps {
            assert!(quoted(step).iter().any(|(text, _)| is_path(text)), "{heading}: no file: {step}");
        }
    }
}

#[test]
fn a_wrong_name_is_found() {
    let tree = ["work", "work/gate.rs", "src/memory/gate.rs", "docs/aims.md"].map(PathBuf::from);
    let read =
        |file: &Path| if file.ends_with("work/gate.rs") { "fn enter(".to_owned() } else { String::new() };
    let of = |document: &str| missing(document, &tree, read);
    let nothing = Vec::<String>::new();
    assert_eq!(of("`work/gate.rs`, `enter`: `work/`, `aims.md`, `Account::hold`, `/proc/x/`"), nothing);
    assert_eq!(of("```\n`gone.rs`\n```\nnone"), nothing);
    assert_eq!(of("a\n`work/gates.rs` and `gate.rs`"), ["2: there is no work/gates.rs"]);
    assert_eq!(of("`ate.rs`"), ["1: there is no ate.rs"]);
    assert_eq!(of("`gate.rs`, `leave`"), ["1: there is no fn leave in gate.rs"]);
    assert_eq!(steps("### A\n1. a\nb\n2. c\n### B\n3. d", "### A"), ["1. a", "2. c"]);
}

/// A title as the part of a link behind `#`, as GitHub makes it.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
    kept.trim().to_lowercase().replace(' ', "-")
}

/// The lines of a document that are neither commands nor pictures.
fn prose(document: &str) -> impl Iterator<Item = &str> {
    let mut is_block = false;
    document.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_block ^= is_fence;
        !is_block && !is_fence
    })
}

/// The relative links of a document, `path` from the root of the tree, that lead to no file or to no title of it.
fn broken_links(path: &Path, read: impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let document = read(path).unwrap_or_default();
    let mut broken = Vec::new();
    let links =
        prose(&document).flat_map(|line| line.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.contains("://")) {
        let (file, title) = link.split_once('#').unwrap_or((link, ""));
        let mut to = path.parent().unwrap_or(Path::new("")).to_owned();
        for part in file.split('/').filter(|part| *part != ".") {
            if part == ".." {
                to.pop();
            } else {
                to.push(part);
            }
        }
        let target = if file.is_empty() { Some(document.clone()) } else { read(&to) };
        let place = path.display();
        let Some(target) = target else {
            broken.push(format!("{place}: {link}: there is no such file"));
            continue;
        };
        let titles: BTreeSet<String> = prose(&target)
            .filter(|line| line.starts_with('#'))
            .map(|line| anchor(line.trim_start_matches('#')))
            .collect();
        if !title.is_empty() && !titles.contains(title) {
            broken.push(format!("{place}: {link}: there is no such title"));
        }
    }
    broken
}

#[test]
fn links_of_documents_lead_somewhere() {
    let is_document = |path: &PathBuf| {
        // The beginning of a page that is generated in another folder.
        path.extension().is_some_and(|e| e == "md") && !path.ends_with("entry-points.head.md")
    };
    let documents: Vec<_> = tree().into_iter().filter(is_document).collect();
    assert!(documents.len() > 15, "only {documents:?} were found");
    let read = |path: &Path| {
        let path = root().join(path);
        // A folder, or a picture, has no titles.
        path.exists().then(|| fs::read_to_string(path).unwrap_or_default())
    };
    let broken: Vec<_> = documents.iter().flat_map(|path| broken_links(path, read)).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn documents_of_a_distribution_lead_to_each_other() {
    let is_shipped = |path: &Path| shipped::DOCUMENTS.iter().any(|document| path.starts_with(document));
    let read = |path: &Path| {
        let there = root().join(path);
        (is_shipped(path) && there.exists()).then(|| fs::read_to_string(there).unwrap_or_default())
    };
    let is_document = |path: &PathBuf| path.extension().is_some_and(|e| e == "md") && is_shipped(path);
    let documents: Vec<_> = tree().into_iter().filter(is_document).collect();
    assert!(documents.len() > 15, "only {documents:?} were found");
    let broken: Vec<_> = documents.iter().flat_map(|path| broken_links(path, read)).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
    // The package has them as well, but for its licence, which is Debian's `copyright` there, and files that it installs in their places.
    let package = fs::read_to_string(root().join("nvshare-scheduler/Cargo.toml")).unwrap();
    for document in shipped::DOCUMENTS.iter().filter(|document| !["LICENSE", "packaging"].contains(document))
    {
        let all = if document.ends_with(".md") { "" } else { "/**/*.*" };
        let asset = format!("[\"../dist/{document}{all}\", \"usr/share/doc/nvshare/");
        assert!(package.contains(&asset), "the package has no {document}");
    }
}

#[test]
fn documents_name_the_compiler_that_is_needed() {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version =
        workspace.lines().find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"'));
    let named = format!("Rust {} or newer", version.expect("a version"));
    for document in ["README.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let needs = text.matches("C compiler").count();
        assert!(needs > 0 && text.matches(&named).count() == needs, "{document}: {named}");
    }
}

#[test]
fn a_broken_link_is_found() {
    let read = |path: &Path| {
        match path.to_str()? {
        "docs/a.md" => Some("# One: `two`\n[b](../b.md#it-is) [c](c.md), [b](../b.md#is-it) [a](#one-two)\n```\n[x](x.md)\n```\n".to_owned()),
        "b.md" => Some("## It is\n".to_owned()),
        _ => None,
    }
    };
    let expected =
        ["docs/a.md: c.md: there is no such file", "docs/a.md: ../b.md#is-it: there is no such title"];
    assert_eq!(broken_links(Path::new("docs/a.md"), read), expected);
}

/// The sentences of a document: of its paragraphs, titles, items of lists and cells of tables. A quoted text is one word.
fn sentences(document: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    for line in prose(document).filter(|line| !line.starts_with("<!--")) {
        let line = line.trim();
        let number = line.split_once(". ").is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if line.starts_with('|') {
            texts.extend(line.split('|').map(|cell| cell.trim().to_owned()));
            texts.push(String::new());
        } else if number || line.is_empty() || ["- ", "#", "!["].iter().any(|begin| line.starts_with(begin)) {
            texts.push(line.trim_start_matches(['-', '#', ' ']).to_owned());
        } else if let Some(text) = texts.last_mut() {
            text.push(' ');
            text.push_str(line);
        }
    }
    let plain = |text: String| {
        let unquoted = text.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "`" });
        // "[text](target)" reads as its text.
        let unlinked = unquoted.collect::<String>();
        let parts = unlinked.split("](").enumerate();
        parts
            .map(|(at, part)| if at == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) })
            .collect::<String>()
            .replace("**", "")
    };
    texts.into_iter().map(plain).flat_map(|text| split_sentences(&text)).collect()
}

fn split_sentences(text: &str) -> Vec<String> {
    let mut sentences = vec![String::new()];
    let words: Vec<&str> = text.split_whitespace().collect();
    for (at, word) in words.iter().enumerate() {
        let sentence = sentences.last_mut().expect("there is one");
        sentence.push_str(if sentence.is_empty() { "" } else { " " });
        sentence.push_str(word);
        let is_end = word.ends_with(['.', '?', '!', ':']);
        let begins = |next: &&str| !next.starts_with(|c: char| c.is_lowercase());
        if is_end && words.get(at + 1).is_some_and(begins) {
            sentences.push(String::new());
        }
    }
    sentences
}

/// Whether a sentence says `so many` or `so long` in place of a number, and not `so long as`.
fn has_a_number_that_is_not_told(sentence: &str) -> bool {
    let sentence = sentence.to_lowercase();
    sentence.contains("so many") || sentence.split("so long").skip(1).any(|then| !then.starts_with(" as "))
}

/// Faults in the prose of a document, as far as they can be counted.
fn faults(document: &str) -> Vec<String> {
    let rows = prose(document).filter(|line| line.starts_with('|'));
    let cells = rows.flat_map(|row| row.split('|').map(str::trim));
    let long_cells = cells.filter(|cell| cell.chars().count() > MAX_CELL);
    let mut faults: Vec<_> = long_cells.map(|cell| format!("a long cell: {cell}")).collect();
    for sentence in sentences(document) {
        let words = sentence.split(' ').filter(|word| word.chars().any(|c| c.is_alphanumeric() || c == '`'));
        let has_subject =
            !["Who ", "What ", "Whoever ", "Whatever "].iter().any(|word| sentence.starts_with(word));
        if words.count() > MAX_WORDS {
            faults.push(format!("{LONG}: {sentence}"));
        } else if !has_subject && !sentence.ends_with('?') {
            faults.push(format!("a subject that asks: {sentence}"));
        } else if has_a_number_that_is_not_told(&sentence) {
            faults.push(format!("a number that is not told: {sentence}"));
        }
    }
    faults
}

#[test]
fn documents_are_short_and_plain() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.lines().count() <= MAX_LINES_OF_README, "README.md has {} lines", readme.lines().count());
    // A generated page and its beginning, and one whose table is held against the scheduler's.
    let others = ["entry-points.md", "entry-points.head.md", "metrics.md"];
    let is_plain = |path: &PathBuf| {
        path.extension().is_some_and(|e| e == "md") && !others.iter().any(|other| path.ends_with(other))
    };
    let documents: Vec<_> = tree().into_iter().filter(is_plain).collect();
    assert!(documents.len() > 20, "only {documents:?} were found");
    let faults = documents.iter().flat_map(|path| {
        let faults = faults(&fs::read_to_string(root().join(path)).unwrap());
        faults.into_iter().map(move |fault| format!("{}: {fault}", path.display()))
    });
    let faults: Vec<_> = faults.collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

/// The comments of a source as a document: code is empty lines there.
fn comments(source: &str) -> String {
    let comment = |line: &str| {
        let signs = ["///", "//!", "//"];
        signs.iter().find_map(|sign| line.trim_start().strip_prefix(sign)).unwrap_or_default().to_owned()
    };
    source.lines().map(comment).collect::<Vec<_>>().join("\n")
}

#[test]
fn comments_are_plain() {
    let source = "/// What waits\n/// goes on. It waits.\nfn waits() {}\n    // It has so many words.";
    assert_eq!(faults(&comments(source)).len(), 2);
    let is_in = |path: &Path, folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
    let is_source = |path: &PathBuf| path.extension().is_some_and(|e| e == "rs") && is_in(path, &TOLD);
    let sources: Vec<_> = tree().into_iter().filter(is_source).collect();
    assert!(sources.len() > 500, "only {} sources were found", sources.len());
    let faults = sources.iter().flat_map(|path| {
        let faults = faults(&comments(&fs::read_to_string(root().join(path)).unwrap())).into_iter();
        let counts = |fault: &String| is_in(path, &PLAIN) || !fault.starts_with(LONG);
        faults.filter(counts).map(move |fault| format!("{}: {fault}", path.display()))
    });
    let faults: Vec<_> = faults.collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn prose_that_is_long_or_asks_is_found() {
    let nothing = Vec::<String>::new();
    let of = |document: &str| {
        faults(document).iter().map(|fault| fault.split(':').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let words = |count: usize| vec!["a"; count].join(" ");
    assert_eq!(
        of(&format!("{}.\n{}.\n", words(25).replacen('a', "A", 1), words(24).replacen('a', "A", 1))),
        nothing
    );
    assert_eq!(of(&format!("{}\n{}", words(13), words(13))), ["a long sentence"]);
    assert_eq!(of(&format!("- {}\n- {}", words(13), words(13))), nothing);
    assert_eq!(of(&format!("[{}](b.md) `{}`", words(24), words(9))), nothing);
    assert_eq!(of(&format!("```\n{}\n```", words(26))), nothing);
    assert_eq!(of(&format!("| {} |", "x".repeat(201))), ["a long cell"]);
    assert_eq!(of("It is. Who asks waits. Who asks?"), ["a subject that asks"]);
    for untold in ["It has so many lines.", "So many lines.", "It waits for so long.", "Parts of so many."] {
        assert_eq!(of(untold), ["a number that is not told"], "{untold}");
    }
    assert_eq!(of("It waits so long as it can."), nothing);
}
