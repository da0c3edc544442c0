//! The documents of a distribution: the tarball has them all.

/// Files and folders, from the root of the tree. Links from one lead to another.
pub(crate) const DOCUMENTS: [&str; 8] = [
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "docs",
    "manifests",
    "packaging",
];
