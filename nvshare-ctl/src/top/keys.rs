//! The effects of keys in `top`.

use clap::ValueEnum;
use nvshare_proto::units::{parse_quantum, parse_weight};
use nvshare_proto::{AdminRequest, QuantumRule, TenantSettings};

use super::Top;
use crate::arguments;
use crate::show::Sort;

/// A key with an effect in `top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
}

/// The user's wish behind a key.
#[derive(Debug, PartialEq)]
pub(crate) enum Wish {
    Nothing,
    Quit,
    Change(AdminRequest),
}

/// All keys, as `top` shows them on `?` and `top --help` lists them.
pub(crate) const HELP: &str = "\
Keys:
  up, k / down, j  select a client, the one before or after
  Esc              select none; if none is selected: quit
  w                set the selected client's weight
  l                limit its compute time, in per cent; none: no limit
  m                limit its memory (4g, 512MiB); none: no limit
  p                pause it, or let it go on
  t                set the quantum of every GPU
  o                switch scheduling off, or on
  s                sort by the next column
  ?                show these keys, or hide them
  q, Ctrl-C        quit
What is set for a client holds for all processes of its tenant.";

/// The largest number of characters of a typed text.
const MAX_FILTER: usize = 24;

/// The text that the user is typing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) what: Typed,
    pub(crate) text: String,
}

/// The setting that a typed text is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Typed {
    Quantum,
    /// The weight of this client.
    Weight(u64),
    Compute(u64),
    Memory(u64),
}

impl Typed {
    /// The request that the text stands for, or the reason why it is none.
    fn read(self, text: &str) -> Result<AdminRequest, String> {
        let give = |client, given| AdminRequest::SetTerms { client, gpu: None, given };
        let none = TenantSettings::default();
        match self {
            Self::Quantum => {
                let millis = parse_quantum(text).map_err(|error| error.to_string())?.as_millis() as u64;
                Ok(AdminRequest::SetQuantum { gpu: None, quantum: QuantumRule::Fixed { millis } })
            }
            Self::Weight(client) => {
                let weight = parse_weight(text).map_err(|error| error.to_string())?;
                Ok(give(client, TenantSettings { weight: Some(weight), ..none }))
            }
            Self::Compute(client) => Ok(give(
                client,
                TenantSettings { compute: Some(arguments::parse_compute_limit(text)?), ..none },
            )),
            Self::Memory(client) => Ok(give(
                client,
                TenantSettings { memory: Some(arguments::parse_memory_limit(text)?), ..none },
            )),
        }
    }
}

impl Top {
    /// Handles a key; returns the user's wish.
    pub(crate) fn press(&mut self, key: Key) -> Wish {
        if self.prompt.is_some() {
            return self.type_on(key);
        }
        self.message = None;
        let shows_keys = std::mem::take(&mut self.shows_keys);
        match key {
            Key::Char('q') => return Wish::Quit,
            Key::Escape if shows_keys => {}
            Key::Escape if self.selected.take().is_none() => return Wish::Quit,
            Key::Char('?') => self.shows_keys = !shows_keys,
            Key::Up | Key::Char('k') => self.select(false),
            Key::Down | Key::Char('j') => self.select(true),
            Key::Char('t') => self.ask(Typed::Quantum),
            Key::Char(key @ ('w' | 'l' | 'm')) => {
                if let Some(client) = self.chosen() {
                    self.ask(match key {
                        'w' => Typed::Weight(client),
                        'l' => Typed::Compute(client),
                        _ => Typed::Memory(client),
                    });
                }
            }
            Key::Char('p') => {
                let Some(client) = self.chosen() else { return Wish::Nothing };
                let paused = self.client(client).is_some_and(|client| client.share.paused);
                let given = TenantSettings { paused: Some(!paused), ..TenantSettings::default() };
                return Wish::Change(AdminRequest::SetTerms { client, gpu: None, given });
            }
            Key::Char('o') => {
                let on = self.status.as_ref().is_none_or(|status| status.scheduler.scheduling);
                let change = if on { AdminRequest::Off { force: false } } else { AdminRequest::On };
                return Wish::Change(change);
            }
            Key::Char('s') => {
                let all = Sort::value_variants();
                let next = all.iter().position(|&sort| sort == self.sort).map_or(0, |at| at + 1);
                self.sort = all[next % all.len()];
                self.sort_clients();
            }
            _ => {}
        }
        Wish::Nothing
    }

    fn ask(&mut self, what: Typed) {
        self.prompt = Some(Prompt { what, text: String::new() });
    }

    fn type_on(&mut self, key: Key) -> Wish {
        let Some(prompt) = &mut self.prompt else { return Wish::Nothing };
        match key {
            Key::Char(c) if c.is_ascii_graphic() && prompt.text.len() < MAX_FILTER => prompt.text.push(c),
            Key::Backspace => drop(prompt.text.pop()),
            Key::Escape => self.prompt = None,
            Key::Enter => {
                let read = prompt.what.read(&prompt.text);
                self.prompt = None;
                match read {
                    Ok(change) => return Wish::Change(change),
                    Err(error) => self.message = Some(error),
                }
            }
            Key::Char(_) | Key::Up | Key::Down => {}
        }
        Wish::Nothing
    }

    /// The selected client; without one, a message says so.
    fn chosen(&mut self) -> Option<u64> {
        if self.selected.is_none() {
            self.message = Some("select a client first: down or j".to_owned());
        }
        self.selected
    }

    /// Selects the next client, or the one before; without a selected client, the first or the last.
    fn select(&mut self, next: bool) {
        let Some(status) = &self.status else { return };
        let ids: Vec<u64> =
            status.clients.iter().filter(|client| !client.gone).map(|client| client.client).collect();
        let at = self.selected.and_then(|selected| ids.iter().position(|&id| id == selected));
        let last = ids.len().saturating_sub(1);
        let to = match (at, next) {
            (None, true) => 0,
            (None, false) => last,
            (Some(at), true) => (at + 1).min(last),
            (Some(at), false) => at.saturating_sub(1),
        };
        self.selected = ids.get(to).copied();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use nvshare_proto::ClientState;

    use super::*;
    use crate::top::tests::{client, status};

    fn top() -> Top {
        let mut top = Top::new(false);
        let clients = [1, 2, 3].map(|id| client(id, ClientState::Waiting, 0, 0));
        top.look(Ok(status(clients.to_vec())), Instant::now());
        top
    }

    /// The wish behind the last of these keys; the keys before have none.
    fn pressed(top: &mut Top, keys: &str) -> Wish {
        let mut last = Wish::Nothing;
        for key in keys.chars() {
            assert_eq!(last, Wish::Nothing, "{keys}");
            last = top.press(match key {
                '\n' => Key::Enter,
                '<' => Key::Backspace,
                '~' => Key::Escape,
                c => Key::Char(c),
            });
        }
        last
    }

    fn give(client: u64, given: TenantSettings) -> Wish {
        Wish::Change(AdminRequest::SetTerms { client, gpu: None, given })
    }

    #[test]
    fn keys_ask_for_changes() {
        let mut top = top();
        assert_eq!(pressed(&mut top, "o"), Wish::Change(AdminRequest::Off { force: false }));
        let change = Wish::Change(AdminRequest::SetQuantum {
            gpu: None,
            quantum: QuantumRule::Fixed { millis: 2500 },
        });
        assert_eq!(pressed(&mut top, "t27<.5\n"), change);
        assert_eq!(pressed(&mut top, "t0\n"), Wish::Nothing);
        assert!(top.message.as_ref().is_some_and(|message| message.contains("accepted: seconds")));
        assert_eq!((pressed(&mut top, "s"), top.sort), (Wish::Nothing, Sort::User));
        assert_eq!(pressed(&mut top, "q"), Wish::Quit);
        assert_eq!(pressed(&mut top, "~"), Wish::Quit, "there is nothing to leave but top");
    }

    #[test]
    fn keys_change_the_selected_client() {
        let mut top = top();
        let none = TenantSettings::default();
        for (keys, given) in [
            ("w400\n", TenantSettings { weight: Some(400), ..none }),
            ("l25%\n", TenantSettings { compute: Some(25), ..none }),
            ("lnone\n", TenantSettings { compute: Some(0), ..none }),
            ("m2GiB\n", TenantSettings { memory: Some(2 << 30), ..none }),
            ("p", TenantSettings { paused: Some(true), ..none }),
        ] {
            top.selected = None;
            assert_eq!(pressed(&mut top, &keys[..1]), Wish::Nothing, "nobody is selected");
            assert_eq!(top.message.as_deref(), Some("select a client first: down or j"));
            assert_eq!(pressed(&mut top, &format!("jj{keys}")), give(2, given), "{keys}");
        }
        if let Some(status) = &mut top.status {
            status.clients[1].share.paused = true;
        }
        assert_eq!(pressed(&mut top, "p"), give(2, TenantSettings { paused: Some(false), ..none }));
        for (keys, said) in
            [("w0\n", "accepted: 1 to 10000"), ("l101\n", "or none"), ("m1k\n", "the least is")]
        {
            assert_eq!(pressed(&mut top, keys), Wish::Nothing);
            assert!(top.message.as_ref().is_some_and(|message| message.contains(said)), "{:?}", top.message);
        }
        assert_eq!((pressed(&mut top, "w4~"), &top.prompt), (Wish::Nothing, &None), "it was left");
    }

    #[test]
    fn the_selection_moves_and_goes_with_its_client() {
        let mut top = top();
        for (key, selected) in [(Key::Up, 3), (Key::Down, 3), (Key::Up, 2), (Key::Up, 1), (Key::Up, 1)] {
            top.press(key);
            assert_eq!(top.selected, Some(selected));
        }
        // A typed text is for the client that was selected, not for the one in its place now.
        pressed(&mut top, "w5");
        let rest = [2, 3].map(|id| client(id, ClientState::Waiting, 0, 0));
        top.look(Ok(status(rest.to_vec())), Instant::now());
        assert_eq!((top.selected, &top.prompt), (None, &None));
        assert_eq!(top.message.as_deref(), Some("client 1 has gone"));
        pressed(&mut top, "j");
        assert_eq!((top.selected, pressed(&mut top, "~")), (Some(2), Wish::Nothing));
        assert_eq!(top.selected, None);
    }

    #[test]
    fn the_selection_goes_with_its_scheduler() {
        let mut top = top();
        // In a pod each scheduler is process 1, but none runs for less long than before.
        for (pid, uptime_s, selected) in [(5, 61, Some(1)), (5, 62, Some(1)), (5, 3, None), (6, 70, None)] {
            top.selected = Some(1);
            let mut status = status(vec![client(1, ClientState::Waiting, 0, 0)]);
            (status.scheduler.pid, status.scheduler.uptime_s) = (pid, uptime_s);
            top.look(Ok(status), Instant::now());
            assert_eq!(top.selected, selected, "{pid} {uptime_s}");
        }
    }
}
