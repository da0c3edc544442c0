//! Facts that an ELF file contains.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, FileHeader as _};
use object::{Endianness, Object, ObjectSymbol, elf};

/// Names of the symbols that a library exports.
///
/// # Errors
/// The file cannot be read, or is not a library.
pub(crate) fn exports(path: &Path) -> Result<BTreeSet<String>, String> {
    let describe = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = fs::read(path).map_err(|error| describe(&error))?;
    let file: ElfFile64<'_> =
        ElfFile64::parse(&*bytes).map_err(|_| format!("{} is not a 64-bit library", path.display()))?;
    let names = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    Ok(names.filter_map(|symbol| symbol.name().ok().map(str::to_owned)).collect())
}

/// The way in which a program is started, as far as a preload is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Start {
    /// The dynamic loader starts the program, and preloads.
    Dynamic,
    /// The program starts without the dynamic loader.
    Static,
    /// A loader of other libraries starts the program: 32 bits, or of another machine.
    Foreign,
    /// The program that the file's first line names starts it.
    Script(PathBuf),
    /// The file does not tell.
    Unknown,
}

/// Looks at a program's first bytes.
pub(crate) fn start(path: &Path) -> Start {
    // Program headers stand at the beginning of a file, and a first line is shorter than this.
    let mut head = vec![0; 64 << 10];
    let read = File::open(path).and_then(|mut file| {
        let mut used = 0;
        while used < head.len() {
            match file.read(&mut head[used..]) {
                Ok(0) => break,
                Ok(read) => used += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(used)
    });
    match read {
        Ok(used) => start_of(&head[..used]),
        Err(_) => Start::Unknown,
    }
}

fn start_of(head: &[u8]) -> Start {
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        let program = line.split_whitespace().next();
        return program.map_or(Start::Unknown, |program| Start::Script(program.into()));
    }
    if !head.starts_with(&elf::ELFMAG) {
        return Start::Unknown;
    }
    let machine = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    let Ok(header) = elf::FileHeader64::<Endianness>::parse(head) else { return Start::Foreign };
    let Ok(endian) = header.endian() else { return Start::Foreign };
    if header.e_machine(endian) != machine {
        return Start::Foreign;
    }
    match header.program_headers(endian, head) {
        Ok(headers) if headers.iter().any(|header| header.p_type.get(endian) == elf::PT_INTERP) => {
            Start::Dynamic
        }
        Ok(_) => Start::Static,
        Err(_) => Start::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_by_their_first_bytes() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(start(&own), Start::Dynamic);
        assert_eq!(start_of(b"#! /usr/bin/env python3\nprint()"), Start::Script("/usr/bin/env".into()));
        assert_eq!(start_of(b"#!\n"), Start::Unknown);
        assert_eq!(start_of(b"echo no first line"), Start::Unknown);
        let mut header = fs::read(&own).unwrap();
        header.truncate(64);
        // No program headers at all.
        header[56..58].copy_from_slice(&[0, 0]);
        assert_eq!(start_of(&header), Start::Static);
        header[18] = 3;
        assert_eq!(start_of(&header), Start::Foreign);
        header[4] = 1;
        assert_eq!(start_of(&header), Start::Foreign);
        assert_eq!(start(Path::new("/no/such/program")), Start::Unknown);
    }
}
