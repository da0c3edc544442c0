//! Link options of the preloaded library.

fn main() {
    // A thread that outlives a `dlclose` of the library would run unmapped code; so would its keys' destructors.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Calls between our own functions must not be bound to another library's symbols of the same name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvshare.so");
    println!("cargo:rerun-if-changed=build.rs");
}
