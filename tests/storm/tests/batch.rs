//! A batch goes on after a finding.

use std::process::Command;

/// Programs that may take no time at all are held for hanging, and these take some.
#[test]
fn every_seed_of_a_batch_is_tried_whatever_is_found_before() {
    let output = Command::new(env!("CARGO_BIN_EXE_nvshare-storm"))
        .args(["storm", "--native", "--seeds", "6", "--batch", "3", "--jobs", "2", "--patience", "0"])
        .args(["--steps", "1500"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for seed in 1..=6 {
        assert!(said.contains(&format!("storm: seed {seed}, natively: hang")), "{said}");
    }
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("storm: 6 seeds from 1") && last.contains(" 6 findings natively"), "{said}");
}
