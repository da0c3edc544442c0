//! Shared libraries that are loaded, read from where the loader has mapped them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

/// Whether a library is loaded, in any scope, whose path contains `part`.
pub(crate) fn is_loaded(part: &str) -> bool {
    struct Search<'a>(&'a [u8], bool);

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        // SAFETY: as above.
        search.1 |= unsafe { has_in_path(info, search.0) };
        c_int::from(search.1)
    }

    let mut search = Search(part.as_bytes(), false);
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.1
}

/// Whether an address is in a library that is loaded, in any scope, whose path contains `part`.
pub(crate) fn is_in_loaded(address: usize, part: &str) -> bool {
    struct Search<'a>(usize, &'a [u8], bool);

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        // SAFETY: as above.
        if unsafe { has_in_path(info, search.1) } {
            search.2 |= (0..usize::from(info.dlpi_phnum)).any(|i| {
                // SAFETY: within the object's program headers.
                let header = unsafe { &*info.dlpi_phdr.add(i) };
                let begin = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
                header.p_type == libc::PT_LOAD
                    && search.0.checked_sub(begin).is_some_and(|at| at < header.p_memsz as usize)
            });
        }
        c_int::from(search.2)
    }

    let mut search = Search(address, part.as_bytes(), false);
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.2
}

/// Returns the bytes of memory that each thread has of the objects that are loaded.
pub(crate) fn memory_of_each_thread() -> usize {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, sum) = unsafe { (&*info, &mut *sum.cast::<usize>()) };
        // SAFETY: within the object's program headers.
        let headers = (0..usize::from(info.dlpi_phnum)).map(|i| unsafe { &*info.dlpi_phdr.add(i) });
        let sizes = headers.filter(|header| header.p_type == libc::PT_TLS);
        *sum += sizes
            .map(|header| header.p_memsz.next_multiple_of(header.p_align.max(1)) as usize)
            .sum::<usize>();
        0
    }

    let mut sum = 0;
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut sum).cast()) };
    sum
}

/// Whether the path of an object contains `part`.
///
/// # Safety
/// `info` describes a mapped object.
unsafe fn has_in_path(info: &libc::dl_phdr_info, part: &[u8]) -> bool {
    if info.dlpi_name.is_null() {
        return false;
    }
    // SAFETY: the loader's name of the object, a C string.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    path.windows(part.len()).any(|here| here == part)
}

/// Finds a function by name in the loaded libraries whose paths contain one of `libraries`; null if there is none. It reads
/// ELF tables, looks up no symbol, and loads nothing.
pub(crate) fn find_in_loaded(name: &CStr, libraries: &[&str]) -> *const c_void {
    struct Search<'a> {
        name: &'a CStr,
        libraries: &'a [&'a str],
        found: *const c_void,
    }

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        // SAFETY: as above.
        if !search.libraries.iter().any(|part| unsafe { has_in_path(info, part.as_bytes()) }) {
            return 0;
        }
        // SAFETY: an object that the loader has mapped, described by it.
        search.found = unsafe { find_in_object(info, search.name) };
        c_int::from(!search.found.is_null())
    }

    let mut search = Search { name, libraries, found: ptr::null() };
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

#[repr(C)]
struct Dyn {
    tag: i64,
    value: usize,
}

/// The values of entries of an object's dynamic section; 0 where it has no such entry.
///
/// # Safety
/// `info` describes a mapped object.
unsafe fn dynamic<const N: usize>(info: &libc::dl_phdr_info, tags: [i64; N]) -> [usize; N] {
    let mut values = [0; N];
    for i in 0..usize::from(info.dlpi_phnum) {
        // SAFETY: within the object's program headers.
        let header = unsafe { &*info.dlpi_phdr.add(i) };
        if header.p_type != libc::PT_DYNAMIC {
            continue;
        }
        let mut entry = (info.dlpi_addr as usize + header.p_vaddr as usize) as *const Dyn;
        // SAFETY: the dynamic section is mapped and ends with DT_NULL.
        unsafe {
            while (*entry).tag != DT_NULL {
                let places = tags.iter().zip(&mut values).filter(|(tag, _)| **tag == (*entry).tag);
                places.for_each(|(_, value)| *value = (*entry).value);
                entry = entry.add(1);
            }
        }
    }
    values
}

/// Whether an address in the dynamic section is one. Below the object's base are offsets that nobody has relocated: the kernel's own
/// object has such.
fn is_mapped(info: &libc::dl_phdr_info, address: usize) -> bool {
    address > info.dlpi_addr as usize
}

/// The tables of an object's symbols, by their addresses.
struct Tables {
    symbols: usize,
    strings: usize,
}

impl Tables {
    /// # Safety
    /// `info` describes a mapped object whose dynamic section the loader has relocated, as glibc's does.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        // SAFETY: promised by the caller.
        let [symbols, strings] = unsafe { dynamic(info, [DT_SYMTAB, DT_STRTAB]) };
        (is_mapped(info, symbols) && is_mapped(info, strings)).then_some(Self { symbols, strings })
    }

    /// # Safety
    /// The object has more symbols than `index`.
    unsafe fn symbol(&self, index: u32) -> &libc::Elf64_Sym {
        // SAFETY: promised by the caller.
        unsafe { &*(self.symbols as *const libc::Elf64_Sym).add(index as usize) }
    }

    /// # Safety
    /// A symbol of the object.
    unsafe fn name(&self, symbol: &libc::Elf64_Sym) -> &CStr {
        // SAFETY: promised by the caller; names are C strings.
        unsafe { CStr::from_ptr((self.strings + symbol.st_name as usize) as *const c_char) }
    }
}

/// A symbol that a loaded object needs from others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Needed {
    pub(crate) name: String,
    /// The address that the object has for it. Before the first call, that may be a place of its own.
    pub(crate) bound_to: usize,
}

/// The symbols that loaded objects need from others, as far as they are wanted. They are those of relocations: the tables of symbols do
/// not all tell how many they have.
///
/// A lock of the loader is held while `is_wanted` runs, which looks up no symbols. Another thread that opens a library has the lock for that,
/// and waits for this one.
pub(crate) fn needed_in_loaded(is_wanted: fn(&str) -> bool) -> Vec<Needed> {
    struct Search(fn(&str) -> bool, Vec<Needed>);

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
        // SAFETY: an object that the loader has mapped, described by it.
        let Some(tables) = (unsafe { Tables::of(info) }) else { return 0 };
        // SAFETY: as above.
        let [all, bytes, calls, call_bytes] =
            unsafe { dynamic(info, [DT_RELA, DT_RELASZ, DT_JMPREL, DT_PLTRELSZ]) };
        for (first, bytes) in [(all, bytes), (calls, call_bytes)] {
            let count = if is_mapped(info, first) { bytes / size_of::<libc::Elf64_Rela>() } else { 0 };
            for place in 0..count {
                // SAFETY: within a table of relocations, which the loader has mapped.
                let relocation = unsafe { &*(first as *const libc::Elf64_Rela).add(place) };
                let symbol = (relocation.r_info >> 32) as u32;
                if symbol == 0 || !OF_ADDRESSES.contains(&(relocation.r_info as u32)) {
                    continue;
                }
                // SAFETY: the symbol of a relocation is one of the object.
                let symbol = unsafe { tables.symbol(symbol) };
                if symbol.st_shndx != 0 {
                    continue;
                }
                // SAFETY: a symbol of the object.
                let name = unsafe { tables.name(symbol) }.to_str().unwrap_or_default();
                if (search.0)(name) {
                    let place = (info.dlpi_addr as usize).wrapping_add(relocation.r_offset as usize);
                    // SAFETY: a place of the object for an address, which the loader has filled.
                    let bound_to = unsafe { ptr::read_unaligned(place as *const usize) };
                    search.1.push(Needed { name: name.to_owned(), bound_to });
                }
            }
        }
        0
    }

    let mut search = Search(is_wanted, Vec::new());
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.1
}

/// Relocations by which an object gets the address of a symbol: of data, of a function, and of one that it calls.
#[cfg(target_arch = "x86_64")]
const OF_ADDRESSES: [u32; 3] = [1, 6, 7];
#[cfg(target_arch = "aarch64")]
const OF_ADDRESSES: [u32; 3] = [257, 1025, 1026];

/// Looks a defined symbol up in the GNU hash table of an object.
///
/// # Safety
/// `info` describes a mapped object whose dynamic section the loader has relocated, as glibc's does.
unsafe fn find_in_object(info: &libc::dl_phdr_info, name: &CStr) -> *const c_void {
    // SAFETY: promised by the caller.
    let (Some(tables), [hash]) = (unsafe { (Tables::of(info), dynamic(info, [DT_GNU_HASH])) }) else {
        return ptr::null();
    };
    if !is_mapped(info, hash) {
        return ptr::null();
    }
    let wanted = name.to_bytes().iter().fold(5381u32, |h, &c| h.wrapping_mul(33).wrapping_add(u32::from(c)));
    let header = hash as *const u32;
    // SAFETY: the layout of DT_GNU_HASH: four words, the bloom filter of 64-bit words, the buckets, the chains.
    unsafe {
        let (buckets, first, bloom) = (*header, *header.add(1), *header.add(2));
        if buckets == 0 {
            return ptr::null();
        }
        let bucket = header.add(4 + 2 * bloom as usize);
        let chain = bucket.add(buckets as usize);
        let mut index = *bucket.add((wanted % buckets) as usize);
        if index < first {
            return ptr::null();
        }
        loop {
            let link = *chain.add((index - first) as usize);
            let symbol = tables.symbol(index);
            if link | 1 == wanted | 1 && symbol.st_shndx != 0 && tables.name(symbol) == name {
                return (info.dlpi_addr as usize + symbol.st_value as usize) as *const c_void;
            }
            if link & 1 == 1 {
                return ptr::null();
            }
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_librarys_own_look_up_is_found() {
        let libc = ["/libc.so.6", "/libdl.so.2"];
        let found = find_in_loaded(c"dlsym", &libc);
        assert!(!found.is_null());
        assert_eq!(found, libc::dlsym as *const c_void);
        assert!(find_in_loaded(c"no such symbol", &libc).is_null());
    }

    #[test]
    fn what_an_object_needs_from_others_is_found() {
        let needed = needed_in_loaded(|name| name == "dl_iterate_phdr");
        let ours = libc::dl_iterate_phdr as *const () as usize;
        assert!(needed.iter().any(|needed| needed.bound_to == ours), "{needed:?}");
        assert!(needed.iter().all(|needed| needed.name == "dl_iterate_phdr"), "{needed:?}");
        assert!(needed_in_loaded(|name| name == "no such symbol").is_empty());
    }
}
