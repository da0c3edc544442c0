//! The benchmarks are in `benches/`: `cargo bench -p nvshare-bench`.
