//! `nvshare-ctl top`

use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use nvshare_admin::{Scheduler, Status};
use nvshare_proto::AdminRequest;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::output::Done;
use crate::show::Sort;
use crate::top::keys::{HELP, Key, Wish};
use crate::top::{Top, view};

/// Time between two looks for keys.
const KEYS_EVERY: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// Time from one look at the scheduler to the next, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,

    /// How clients are sorted
    #[arg(long, value_name = "KEY", default_value = "client")]
    sort: Sort,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("accepted: 0.1 to 3600".to_owned())
    }
}

/// The meaning of a key of the terminal.
#[derive(Debug, PartialEq, Eq)]
enum Pressed {
    Key(Key),
    Interrupt,
    Nothing,
}

/// The meaning of a key. A letter with another key held down is not that letter: Ctrl-P is no wish to pause.
fn pressed(code: KeyCode, modifiers: KeyModifiers) -> Pressed {
    let is_plain = (modifiers - KeyModifiers::SHIFT).is_empty();
    let key = match code {
        KeyCode::Char(c) if is_plain => Key::Char(c),
        KeyCode::Char('c') if modifiers == KeyModifiers::CONTROL => return Pressed::Interrupt,
        // Terminals that send this for the key above Enter are not rare.
        KeyCode::Char('h') if modifiers == KeyModifiers::CONTROL => Key::Backspace,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        _ => return Pressed::Nothing,
    };
    Pressed::Key(key)
}

/// News from the thread that asks the scheduler.
enum News {
    Looked(Result<Box<Status>, String>),
    Changed(String),
}

pub(crate) fn run(scheduler: Scheduler, options: &Options) -> Done {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err("top needs a terminal; `status` and `watch` do not".to_owned().into());
    }
    // A scheduler that is absent at the beginning is an error; one that goes later may come back.
    let first = scheduler.status()?;
    let (wish, wishes) = mpsc::channel();
    let (tell, news) = mpsc::channel();
    let interval = options.interval;
    thread::spawn(move || talk(&scheduler, interval, &wishes, &tell));
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let mut top = Top::new(!set("NO_COLOR"));
    top.sort = options.sort;
    top.look(Ok(first), Instant::now());
    let mut terminal =
        ratatui::try_init().map_err(|error| format!("this terminal cannot be used: {error}"))?;
    let ended = show(&mut terminal, &mut top, &wish, &news);
    ratatui::restore();
    ended.map_err(|error| format!("the terminal: {error}").into())
}

/// Asks the scheduler, which may take long, while the screen goes on.
fn talk(scheduler: &Scheduler, interval: Duration, wishes: &Receiver<AdminRequest>, tell: &Sender<News>) {
    loop {
        let changed = match wishes.recv_timeout(interval) {
            Ok(change) => Some(scheduler.change(change).unwrap_or_else(|error| error.to_string())),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // The status after a change is read before the change is reported: the next key may depend on it.
        let looked = News::Looked(scheduler.status().map(Box::new).map_err(|error| error.to_string()));
        for news in [looked].into_iter().chain(changed.map(News::Changed)) {
            if tell.send(news).is_err() {
                return;
            }
        }
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    top: &mut Top,
    wish: &Sender<AdminRequest>,
    news: &Receiver<News>,
) -> io::Result<()> {
    let mut drawn: Option<Instant> = None;
    loop {
        let mut changed = drawn.is_none_or(|drawn| drawn.elapsed() > Duration::from_secs(1));
        for news in news.try_iter() {
            changed = true;
            match news {
                News::Looked(looked) => top.look(looked.map(|status| *status), Instant::now()),
                News::Changed(text) => top.message = Some(text),
            }
        }
        if changed {
            terminal.draw(|frame| view::draw(frame, top, Instant::now()))?;
            drawn = Some(Instant::now());
        }
        if !event::poll(KEYS_EVERY)? {
            continue;
        }
        drawn = None;
        let Event::Key(key) = event::read()? else { continue };
        if key.kind != KeyEventKind::Press {
            continue;
        }
        let wish_of_key = match pressed(key.code, key.modifiers) {
            Pressed::Interrupt => return Ok(()),
            Pressed::Nothing => continue,
            Pressed::Key(key) => top.press(key),
        };
        match wish_of_key {
            Wish::Quit => return Ok(()),
            Wish::Change(change) => {
                let _ = wish.send(change);
            }
            Wish::Nothing => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_with_another_key_held_down_changes_nothing() {
        let held = [KeyModifiers::CONTROL, KeyModifiers::ALT, KeyModifiers::CONTROL | KeyModifiers::SHIFT];
        for (letter, modifiers) in ['p', 'o', 'l', 'q'].into_iter().flat_map(|c| held.map(|of| (c, of))) {
            assert_eq!(pressed(KeyCode::Char(letter), modifiers), Pressed::Nothing, "{letter} {modifiers:?}");
        }
        let control = |c| pressed(KeyCode::Char(c), KeyModifiers::CONTROL);
        assert_eq!([control('c'), control('h')], [Pressed::Interrupt, Pressed::Key(Key::Backspace)]);
        assert_eq!(pressed(KeyCode::Char('G'), KeyModifiers::SHIFT), Pressed::Key(Key::Char('G')));
    }
}
