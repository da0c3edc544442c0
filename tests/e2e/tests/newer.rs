//! Functions of a driver that is newer than the library. With memory that the library maps they are refused, since work that they submit
//! passes no gate; otherwise the program gets them, and the log says so.

use std::process::Command;

use nvshare_harness::{Finished, Program, World, guest};

fn tomorrow(memory: &str, answer: &str) -> Finished {
    let world = World::with_driver(&guest("odd_driver", true));
    let program = Program::guest(&world, "tomorrow", &[answer]).env("NVSHARE_MEMORY", memory);
    let finished = program.start().finish();
    finished.passed();
    finished
}

/// How often the log names a function.
fn named(finished: &Finished, function: &str) -> usize {
    finished.log.matches(&format!("{function} is newer than this library")).count()
}

#[test]
fn a_function_that_is_newer_is_refused_where_the_library_maps_memory() {
    let finished = tomorrow("swap", "refused");
    for function in ["cuLaunchTomorrow", "cuMemFreeAsync", "cuMemFreeAsync_v9"] {
        assert_eq!(named(&finished, function), 1, "{}", finished.log);
    }
    assert!(finished.log.contains("is refused with NVSHARE_MEMORY=swap"), "{}", finished.log);
}

#[test]
fn a_function_that_is_newer_is_given_with_a_warning() {
    let finished = tomorrow("managed", "given");
    for function in ["cuLaunchTomorrow", "cuMemFreeAsync", "cuMemFreeAsync_v9"] {
        assert_eq!(named(&finished, function), 1, "{}", finished.log);
    }
    assert!(!finished.log.contains("refused"), "{}", finished.log);
}

/// A linker that finds nothing to export writes a table of symbols that tells nothing of those which the program needs.
#[test]
fn a_program_that_is_linked_to_a_newer_function_is_warned_about() {
    for how in ["-pie", "-no-pie", "-Wl,--hash-style=sysv"] {
        let world = World::with_driver(&guest("odd_driver", true));
        let program = world.dir().join("linked");
        world.link_to_driver(&program, "linked_to_tomorrow.c", &[how]);
        let program = Program::of(&world, "linked", Command::new(program)).preloaded();
        let finished = program.env("NVSHARE_MEMORY", "swap").start().finish();
        finished.passed();
        let warning = "passes no gate: cuLaunchTomorrow\n";
        assert_eq!(finished.log.matches(warning).count(), 1, "{how}: {}", finished.log);
    }
}

/// `RTLD_DEFAULT` means the scope of whoever asks: the library asks for nobody, unless the name is the driver's.
#[test]
fn a_name_that_is_not_the_drivers_is_looked_up_by_its_caller() {
    for memory in ["managed", "swap"] {
        let world = World::with_driver(&guest("odd_driver", true));
        let plug_in = guest("own_name", true);
        let program = Program::guest(&world, "plug_in", &[plug_in.to_str().expect("a path in UTF-8")]);
        program.env("NVSHARE_MEMORY", memory).start().finish().passed();
    }
}
