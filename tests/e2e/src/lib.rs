//! The tests are in `tests/`: one file a subject.
