//! Rules for seats.

use super::rules::Rule;

pub(super) const SEATS: &[Rule] = &[
    Rule {
        what: "the listener says whose a process of a seat is",
        file: "nvshare-scheduler/src/caller.rs",
        from: "        self.peer.read(|| match &self.seat {\n",
        to: "        self.peer.read(|| match self.seat.as_ref().filter(|_| !BROKEN) {\n",
        package: "nvshare-e2e",
        test: "a_seats_processes_share_one_limit_and_their_socket_says_whose_they_are",
    },
    Rule {
        what: "a process of a seat names no GPU that the seat does not have",
        file: "nvshare-scheduler/src/caller.rs",
        from: ".find(|gpu| !seat.gpus.contains(gpu))?",
        to: ".find(|gpu| !seat.gpus.contains(gpu) && !BROKEN)?",
        package: "nvshare-e2e",
        test: "a_seats_processes_have_the_seats_gpus_alone",
    },
    Rule {
        what: "the limits of a seat hold again after a restart",
        file: "nvshare-scheduler/src/core_task.rs",
        from: "                    self.bound(name, now);\n",
        to: "                    if !BROKEN {\n                        self.bound(name, now);\n                    }\n",
        package: "nvshare-e2e",
        test: "seats_are_there_again_after_a_restart_with_their_limits_and_clients",
    },
    Rule {
        what: "a torn record takes no other seat with it",
        file: "nvshare-scheduler/src/seats/record.rs",
        from: "                Err(why) => warnings.push(",
        to: "                Err(_) if BROKEN => return Default::default(),\n                Err(why) => warnings.push(",
        package: "nvshare-scheduler",
        test: "a_record_is_read_as_it_was_written_and_a_torn_one_takes_no_other_with_it",
    },
    Rule {
        what: "at a seat's socket the seat's own clients alone are shown",
        file: "nvshare-scheduler/src/view.rs",
        from: "        (Viewer::Seat(mine), Some(other)) => mine == other,\n",
        to: "        (Viewer::Seat(mine), Some(other)) => mine == other || BROKEN,\n",
        package: "nvshare-scheduler",
        test: "everybody_sees_what_is_their_own",
    },
    Rule {
        what: "a program may ask for less than its seat has",
        file: "nvshare-scheduler/core/src/state/terms.rs",
        from: "        let asks_for_less = own > 0",
        to: "        let asks_for_less = !BROKEN && own > 0",
        package: "nvshare-core",
        test: "what_a_seat_sets_stands_below_an_administrators_word_and_above_what_programs_ask_for",
    },
];
