//! The layers of the library: a lower one never names a higher one, and no files of one layer use each other in a circle.
//! Nor do the files of the client's crate, which has one layer. The scheduler's core has layers of its own, and so has its daemon.
//!
//! Read from the source: the `use` lines, and paths that begin with `crate::` or `super::`. In the core also the calls of methods:
//! several files have methods of one type there, and no `use` line says who calls whose.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest. The list of entry points, at the root, belongs to all.
const LAYERS: [&str; 7] = ["process", "driver", "work", "memory", "session", "lookup", "hooks"];

/// The layers of the scheduler's core, from the lowest to the highest, and the file in which all of them meet.
const CORE_LAYERS: [&str; 7] = ["policy", "state", "judge", "report", "steps", "inputs", "core"];

/// The layers of the scheduler's daemon, from the lowest to the highest.
const DAEMON: [&str; 16] = [
    "lock",
    "bucket",
    "descriptors",
    "log",
    "sockets",
    "gpus",
    "host_memory",
    "metrics",
    "settings",
    "events",
    "seats",
    "setup",
    "identity",
    "core_task",
    "connection",
    "server",
];

/// The types of the core that have methods in several files, and the name of a value of each, and of a method that answers one.
const SPREAD: [(&str, &str); 4] =
    [("State", "state"), ("Report", "report"), ("Books", "books"), ("Round", "round")];

/// Crates of one layer: its name here, and the folder from the library's.
const CRATES: [(&str, &str); 3] = [
    ("client", "client/src"),
    ("core", "../nvshare-scheduler/core/src"),
    ("daemon", "../nvshare-scheduler/src"),
];

/// A place where one file names another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Reference {
    file: PathBuf,
    line: usize,
    from: Unit,
    to: Unit,
    path: String,
}

/// A file or folder directly in a layer; a folder's files belong together. The layer itself has no name in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Unit {
    layer: String,
    name: String,
}

/// The text without comments and without what is between quotes; lines stay lines.
fn code(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '/' if rest.peek() == Some(&'/') => while rest.next_if(|&c| c != '\n').is_some() {},
            '"' => {
                while let Some(c) = rest.next() {
                    match c {
                        '\\' => drop(rest.next()),
                        '"' => break,
                        '\n' => out.push('\n'),
                        _ => {}
                    }
                }
            }
            '\'' if rest.clone().nth(1) == Some('\'') && rest.peek() != Some(&'\\') => _ = rest.nth(1),
            '\'' if rest.peek() == Some(&'\\') => {
                rest.next();
                rest.next();
                while rest.next().is_some_and(|c| c != '\'') {}
            }
            c => out.push(c),
        }
    }
    out
}

/// The paths in a tree like `crate::a::{b, c::{self, d}}`, one after the other.
fn expand(tree: &str, found: &mut Vec<String>) {
    let Some((head, inner)) = tree.split_once('{') else {
        found.push(tree.trim().trim_end_matches("::").to_owned());
        return;
    };
    let inner = inner.trim_end().strip_suffix('}').unwrap_or(inner);
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = inner[begin..at].trim();
                if !item.is_empty() {
                    expand(&format!("{}{item}", head.trim()), found);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// The paths in a piece of code that begin with `crate` or `super`, with the lines that they are on.
fn paths(code: &str) -> Vec<(usize, String)> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(next) = ["crate::", "super::"].iter().filter_map(|word| code[at..].find(word)).min() {
        let begin = at + next;
        at = begin + 1;
        if code[..begin].ends_with(|c| is_name(c) || c == ':') {
            continue;
        }
        let line = code[..begin].matches('\n').count() + 1;
        let mut depth = 0;
        let end = code[begin..].find(|c: char| {
            depth += i32::from(c == '{');
            depth -= i32::from(c == '}');
            depth == 0 && !is_name(c) && !matches!(c, ':' | '}')
        });
        let tree = &code[begin..end.map_or(code.len(), |end| begin + end)];
        let mut all = Vec::new();
        expand(tree, &mut all);
        found.extend(all.into_iter().map(|path| (line, path)));
        at = begin + tree.len().max(1);
    }
    found
}

/// The module that a file is, from the root.
fn module(file: &Path) -> Vec<String> {
    let mut module: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    module.pop_if(|last| last == "mod");
    module
}

/// Whether this is the layer of a crate that has one alone.
fn is_crate(layer: &str) -> bool {
    CRATES.iter().any(|(name, _)| *name == layer)
}

/// The unit that a module belongs to; `None`: the root.
fn unit(module: &[String], files: &BTreeSet<Vec<String>>) -> Option<Unit> {
    let layer = module.first()?.clone();
    (LAYERS.contains(&layer.as_str()) || is_crate(&layer)).then_some(())?;
    let name = module.get(1).filter(|name| files.contains(&vec![layer.clone(), (*name).clone()]));
    Some(Unit { layer, name: name.cloned().unwrap_or_default() })
}

/// All references of the files in `sources`, by their path in `src`; those of a crate of one layer in a folder of its name.
fn references(sources: &BTreeMap<PathBuf, String>) -> Vec<Reference> {
    let files: BTreeSet<Vec<String>> = sources.keys().map(|file| module(file)).collect();
    let mut found = Vec::new();
    for (file, text) in sources {
        let here = module(file);
        let Some(from) = unit(&here, &files) else { continue };
        for (line, path) in paths(&code(text)) {
            let mut names = path.split("::").peekable();
            let mut target = here.clone();
            if names.next_if_eq(&"crate").is_some() {
                target.truncate(usize::from(is_crate(&from.layer)));
            }
            while names.next_if_eq(&"super").is_some() {
                target.pop();
            }
            target.extend(names.map(str::to_owned));
            // Inside `mod tests`, or another module of a file, `super` is the file.
            if let Some(to) = unit(&target, &files).filter(|to| *to != from) {
                found.push(Reference { file: file.clone(), line, from: from.clone(), to, path });
            }
        }
    }
    found
}

/// A file by its path from the library's folder.
fn place(file: &Path) -> String {
    let of_crate = |(name, root): &(&str, &str)| Some(Path::new(root).join(file.strip_prefix(name).ok()?));
    let found = CRATES.iter().find_map(of_crate).unwrap_or_else(|| Path::new("src").join(file));
    found.display().to_string()
}

/// References from a lower one of these layers to a higher one.
fn upwards(layers: &[&str], references: &[Reference]) -> Vec<String> {
    let rank = |layer: &str| layers.iter().position(|known| *known == layer);
    let is_upwards = |r: &&Reference| rank(&r.to.layer) > rank(&r.from.layer);
    let say = |r: &Reference| {
        let (from, to) = (&r.from.layer, &r.to.layer);
        format!("{}:{}: `{from}` is below `{to}`: {}", place(&r.file), r.line, r.path)
    };
    references.iter().filter(is_upwards).map(say).collect()
}

/// The words and signs of a piece of code, each with its line. Two colons are one sign.
fn tokens(code: &str) -> Vec<(usize, &str)> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let (mut found, mut line, mut at) = (Vec::new(), 1, 0);
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at..];
        let length = match c {
            _ if rest.starts_with("::") => 2,
            c if is_name(c) => rest.find(|c| !is_name(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        if !c.is_whitespace() {
            found.push((line, &rest[..length]));
        }
        line += usize::from(c == '\n');
        at += length;
    }
    found
}

/// The type whose methods follow, by what stands behind `impl`.
fn implemented<'a>(behind: &[(usize, &'a str)]) -> &'a str {
    let head: Vec<&str> = behind.iter().map(|(_, token)| *token).take_while(|token| *token != "{").collect();
    let mut depth = 0;
    let mut outside = head.into_iter().filter(|token| {
        depth += i32::from(*token == "<") - i32::from(*token == ">");
        depth == 0 && *token != ">"
    });
    let first = outside.next().unwrap_or_default();
    outside.skip_while(|token| *token != "for").nth(1).unwrap_or(first)
}

/// A method, or a function, of a type.
type Method<'a> = (&'a str, &'a str);

/// The methods that a file defines, and those that it calls of the types in [`SPREAD`], with their lines.
fn methods(code: &str) -> (Vec<Method<'_>>, Vec<(usize, Method<'_>)>) {
    let tokens = tokens(code);
    let (mut defined, mut called, mut depth, mut own) = (Vec::new(), Vec::new(), 0, "");
    for (at, &(line, token)) in tokens.iter().enumerate() {
        let next = |by: usize| tokens.get(at + by).map_or("", |(_, token)| *token);
        let of_value = SPREAD.iter().find(|(_, value)| *value == token).map(|(of, _)| *of);
        let of_path = SPREAD.iter().find(|(of, _)| *of == token).map(|(of, _)| *of);
        match token {
            "impl" if depth == 0 => own = implemented(&tokens[at + 1..]),
            "fn" if depth == 1 && !own.is_empty() => defined.push((own, next(1))),
            "{" => depth += 1,
            "}" => depth -= 1,
            "self" if next(1) == "." && next(3) == "(" => called.push((line, (own, next(2)))),
            "Self" if next(1) == "::" => called.push((line, (own, next(2)))),
            _ if next(1) == "." && next(3) == "(" => called.extend(of_value.map(|of| (line, (of, next(2))))),
            _ if next(1) == "(" && next(2) == ")" && next(3) == "." && next(5) == "(" => {
                called.extend(of_value.map(|of| (line, (of, next(4)))));
            }
            _ if next(1) == "::" => called.extend(of_path.map(|of| (line, (of, next(2))))),
            _ => {}
        }
        if depth == 0 && token == "}" {
            own = "";
        }
    }
    (defined, called)
}

/// The layer and the file of a source of the core; a folder's files in a layer belong together.
fn unit_of(file: &Path) -> Unit {
    let mut names = file
        .with_extension("")
        .iter()
        .skip(1)
        .map(|part| part.to_string_lossy().into_owned())
        .collect::<Vec<_>>();
    names.truncate(2);
    let name = names.pop().unwrap_or_default();
    Unit { layer: names.pop().unwrap_or_else(|| name.clone()), name }
}

/// Calls from one file of the core to a method in another one.
fn calls(sources: &BTreeMap<PathBuf, String>) -> Vec<Reference> {
    let before_tests = |text: &str| code(text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default());
    let code: BTreeMap<&PathBuf, String> =
        sources.iter().map(|(file, text)| (file, before_tests(text))).collect();
    let read: Vec<_> = code.iter().map(|(file, code)| (*file, methods(code))).collect();
    let homes: BTreeMap<Method<'_>, Unit> = read
        .iter()
        .flat_map(|(file, (defined, _))| defined.iter().map(|method| (*method, unit_of(file))))
        .collect();
    let mut found = Vec::new();
    for (file, (_, called)) in &read {
        for (line, method) in called {
            let from = unit_of(file);
            if let Some(to) = homes.get(method).filter(|to| **to != from) {
                let path = format!("{}::{}", method.0, method.1);
                found.push(Reference { file: (*file).clone(), line: *line, from, to: to.clone(), path });
            }
        }
    }
    found
}

fn say_use(r: &Reference) -> String {
    format!("{}:{}: {}", place(&r.file), r.line, r.path)
}

/// References inside a layer that are part of a circle.
fn circles(references: &[Reference]) -> Vec<String> {
    let inside: Vec<&Reference> = references
        .iter()
        .filter(|r| r.from.layer == r.to.layer && !r.from.name.is_empty() && !r.to.name.is_empty())
        .collect();
    let reaches = |from: &Unit, to: &Unit| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(unit) = next.pop() {
            if unit == to {
                return true;
            }
            if seen.insert(unit) {
                next.extend(inside.iter().filter(|r| r.from == *unit).map(|r| &r.to));
            }
        }
        false
    };
    let say = |r: &&Reference| format!("{}:{}: a circle: {}", place(&r.file), r.line, r.path);
    inside.iter().filter(|r| reaches(&r.to, &r.from)).map(say).collect()
}

/// Reads the sources in `dir`, which is called `name`.
fn read(dir: &Path, name: &Path, sources: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = name.join(path.file_name().unwrap());
        if path.is_dir() {
            read(&path, &name, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
}

/// The sources of the library.
fn library() -> BTreeMap<PathBuf, String> {
    let mut sources = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), Path::new(""), &mut sources);
    sources
}

/// The sources of a crate of one layer.
fn one_layer((name, root): (&str, &str)) -> BTreeMap<PathBuf, String> {
    let mut sources = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root), Path::new(name), &mut sources);
    sources
}

#[test]
fn no_layer_names_a_higher_one() {
    let found = upwards(&LAYERS, &references(&library()));
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn no_files_of_a_layer_use_each_other_in_a_circle() {
    for sources in [library()].into_iter().chain(CRATES.map(one_layer)) {
        let references = references(&sources);
        assert!(!references.is_empty(), "nothing was read");
        let found = circles(&references);
        assert!(found.is_empty(), "\n{}", found.join("\n"));
    }
}

#[test]
fn no_layer_of_the_scheduler_names_a_higher_one() {
    for (of, layers) in [(CRATES[1], &CORE_LAYERS[..]), (CRATES[2], &DAEMON)] {
        let mut references = references(&one_layer(of));
        for r in &mut references {
            (r.from.layer, r.to.layer) = (r.from.name.clone(), r.to.name.clone());
        }
        references.retain(|r| layers.contains(&&*r.from.layer));
        assert!(!references.is_empty(), "nothing was read");
        let found = upwards(layers, &references);
        assert!(found.is_empty(), "\n{}", found.join("\n"));
    }
}

#[test]
fn methods_of_the_core_call_down_and_never_in_a_circle() {
    let calls = calls(&one_layer(CRATES[1]));
    assert!(calls.len() > 200, "few calls were read: {}", calls.len());
    let found = [upwards(&CORE_LAYERS, &calls), circles(&calls)].concat();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn a_call_that_is_turned_round_is_found() {
    let of = |judge: &str, books: &str, leaving: &str| {
        let text = [
            ("core/judge/fit.rs", judge),
            ("core/steps/books.rs", books),
            ("core/steps/leaving.rs", leaving),
        ];
        let sources = text.map(|(file, text)| (PathBuf::from(file), text.to_owned())).into();
        let found = calls(&sources);
        (upwards(&CORE_LAYERS, &found), circles(&found))
    };
    let judge = "impl State {\n    fn fits(&self) -> bool { true }\n}";
    let books = "impl Books {\n    fn with(&mut self) { self.state.fits(); }\n}";
    let leaving = "impl Books {\n    fn leave(&mut self) { self.with(); }\n}";
    let nothing = (Vec::<String>::new(), Vec::<String>::new());
    assert_eq!(of(judge, books, leaving), nothing);
    // Another type's method of the same name, and a test.
    let other = "impl Gpu {\n    fn wake(&self) { self.with(); gpu.leave() }\n}\n#[cfg(test)]\nmod tests { fn f() { books.leave() } }";
    assert_eq!(of(judge, &format!("{books}\n{other}"), leaving), nothing);

    let circle = of(
        judge,
        "impl Books {\n    fn with(&mut self) {\n        self\n            .leave();\n    }\n}",
        leaving,
    );
    assert_eq!(circle.1.len(), 2, "{circle:?}");
    assert!(circle.1[0].contains("steps/books.rs:3: a circle: Books::leave"), "{circle:?}");
    let answered = "impl Books {\n    fn with(&mut self) { self.state().fits(); }\n}";
    let above = "impl State {\n    fn fits(&self, books: &Books) -> bool { books.state(); self.books().with(); true }\n}";
    assert_eq!(of(judge, answered, leaving), nothing);
    assert_eq!(of(above, answered, leaving).0.len(), 1, "a value that a method answers");
    let through = "impl<'a> Round<'a> {\n    fn go(&mut self) { self.books.leave() }\n}";
    assert_eq!(of(judge, &format!("{books}\n{through}"), leaving).1.len(), 2);
    assert_eq!(of(judge, &format!("{books}\nfn f(x: X) {{ x.map(Books::leave) }}"), leaving).1.len(), 2);
    let up = of(
        "impl State {\n    fn fits(&self, books: &Books) -> bool { books.with(); Self::fits() }\n}",
        books,
        leaving,
    );
    assert_eq!(up.0, ["../nvshare-scheduler/core/src/judge/fit.rs:2: `judge` is below `steps`: Books::with"]);
}

#[test]
fn the_policies_of_the_core_name_nothing_but_each_other() {
    let from_policies = |references: Vec<Reference>| {
        references.into_iter().filter(|r| r.from.name == "policy").map(|r| say_use(&r)).collect::<Vec<_>>()
    };
    let found = from_policies(references(&one_layer(CRATES[1])));
    assert!(found.is_empty(), "\n{}", found.join("\n"));

    let wrong = [
        ("core/policy/mod.rs", ""),
        ("core/policy/next.rs", "use super::turn;\nuse crate::Time;"),
        ("core/policy/turn.rs", ""),
    ];
    let wrong = wrong.map(|(file, text)| (PathBuf::from(file), text.to_owned())).into();
    let expected = "../nvshare-scheduler/core/src/policy/next.rs:2: crate::Time";
    assert_eq!(from_policies(references(&wrong)), [expected]);
}

#[test]
fn every_folder_is_a_layer() {
    let sources = library();
    for layer in LAYERS {
        assert!(sources.contains_key(&Path::new(layer).join("mod.rs")), "there is no layer {layer}");
    }
    for file in sources.keys() {
        let first = file.iter().next().unwrap().to_string_lossy();
        assert!(
            file.iter().count() == 1 || LAYERS.contains(&&*first),
            "src/{} is in no layer",
            file.display()
        );
    }
}

#[test]
fn a_use_that_is_turned_round_is_found() {
    let of = |gate: &str, life: &str| {
        let text = [
            ("hooks/mod.rs", ""),
            ("session/mod.rs", "pub fn wake() {}"),
            ("work/gate.rs", gate),
            ("work/life.rs", life),
        ];
        let sources = text.map(|(file, text)| (PathBuf::from(file), text.to_owned())).into();
        let found = references(&sources);
        (upwards(&LAYERS, &found), circles(&found))
    };
    let nothing = (Vec::<String>::new(), Vec::<String>::new());
    assert_eq!(of("use super::life;", "use std::fmt;"), nothing);
    // A comment and a text name nothing.
    assert_eq!(
        of("// use crate::session;\nconst A: &str = \"crate::session\";", "/// [`crate::session`]"),
        nothing
    );
    let up =
        |line: usize, path: &str| vec![format!("src/work/gate.rs:{line}: `work` is below `session`: {path}")];
    assert_eq!(of("use std::fmt;\nuse crate::session;", "").0, up(2, "crate::session"));
    assert_eq!(of("use crate::{\n    session::{self, wake},\n};", "").0.len(), 2);
    assert_eq!(of("fn f() {\n    crate::session::wake();\n}", "").0, up(2, "crate::session::wake"));
    assert_eq!(of("use super::super::session::wake;", "").0, up(1, "super::super::session::wake"));
    assert_eq!(of("use super::life;", "use crate::work::gate::Mark;").1.len(), 2);
}

#[test]
fn a_circle_in_a_crate_of_one_layer_is_found() {
    let text = [
        ("client/account/mod.rs", "pub use told::Told;"),
        ("client/account/told.rs", "use super::Account;\nuse crate::{kind::Kind, DeviceFacts};"),
        ("client/kind.rs", "use crate::account::Account;"),
        ("client/lib.rs", "pub use account::Account;"),
    ];
    let sources = text.map(|(file, text)| (PathBuf::from(file), text.to_owned())).into();
    let found = circles(&references(&sources));
    let expected = [
        "client/src/account/told.rs:2: a circle: crate::kind::Kind",
        "client/src/kind.rs:1: a circle: crate::account::Account",
    ];
    assert_eq!(found, expected);
}
