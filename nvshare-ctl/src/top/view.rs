//! Draws `top`. Letters say the same as colours.

use std::collections::VecDeque;
use std::time::Instant;

use nvshare_proto::units::{Bytes, GIB};
use nvshare_proto::{ClientState, ClientStatus, GpuStatus, short_command};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::keys::{HELP, Prompt, Typed};
use super::{History, Top, waits};
use crate::show;

/// The smallest terminal that can show something.
const MIN_SIZE: (u16, u16) = (48, 8);
/// Columns of a sparkline.
const SPARK: usize = 10;
const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws the whole screen for the present moment.
pub(crate) fn draw(frame: &mut Frame<'_>, top: &Top, now: Instant) {
    let area = frame.area();
    if area.width < MIN_SIZE.0 || area.height < MIN_SIZE.1 {
        let text =
            format!("{}×{} is too small: top needs {}×{}", area.width, area.height, MIN_SIZE.0, MIN_SIZE.1);
        let lines: Vec<Line<'_>> = wrap(&text, usize::from(area.width)).into_iter().map(Line::from).collect();
        return frame.render_widget(Paragraph::new(lines), area);
    }
    let width = usize::from(area.width);
    let room = usize::from(area.height) - 1;
    let mut lines = vec![head(top, width)];
    if top.shows_keys {
        lines.extend(HELP.lines().map(|line| Line::from(cut(line, width))));
    } else if let Some(status) = &top.status {
        for gpu in &status.gpus {
            lines.extend(gpu_lines(top, gpu, width, now));
        }
        lines.push(Line::default());
        let mut rows = clients(top, &status.clients, width, now);
        // The table's head and the rows before the selected client stay out where there is no room for all.
        let before = lines.len() + rows.head.len();
        let skipped = rows.skip(room.saturating_sub(before + 1));
        lines.extend(rows.head);
        lines.extend(rows.clients);
        cut_off(&mut lines, room, skipped);
    }
    cut_off(&mut lines, room, 0);
    frame.render_widget(Paragraph::new(lines), Rect { height: area.height - 1, ..area });
    let foot = Rect { y: area.bottom() - 1, height: 1, ..area };
    frame.render_widget(Paragraph::new(footer(top, width)), foot);
}

/// Adds a line that counts the lines without room, with those that were skipped before.
fn cut_off(lines: &mut Vec<Line<'_>>, room: usize, skipped: usize) {
    if lines.len() > room || skipped > 0 {
        let hidden = (lines.len() + 1).saturating_sub(room) + skipped;
        lines.truncate(room - 1);
        lines.push(Line::from(format!("… {hidden} more lines")));
    }
}

/// Breaks words into lines of at most `width`, as far as the words allow.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

fn style(top: &Top, colour: Color) -> Style {
    if top.colours { Style::new().fg(colour) } else { Style::new() }
}

fn head(top: &Top, width: usize) -> Line<'static> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    if let Some(why) = &top.lost {
        let text = format!("no scheduler: it is looked for; what follows is old ({why})");
        return Line::styled(cut(&text, width), style(top, Color::Red).add_modifier(Modifier::BOLD));
    }
    let Some(status) = &top.status else { return Line::from("asking the scheduler …") };
    let about = &status.scheduler;
    let scheduling = if about.scheduling { "on" } else { "OFF: everybody runs" };
    let text = format!(
        "nvshare-scheduler {}  up {}  scheduling {scheduling}  TQ {}",
        about.version,
        show::span(about.uptime_s),
        show::quantum(about, &status.gpus)
    );
    let text = if about.restricted { text + "  (your own clients)" } else { text };
    Line::styled(cut(&text, width), bold)
}

/// A GPU's memory as a bar: resident, absent, and free.
fn bar(gpu: &GpuStatus, width: usize) -> [usize; 3] {
    let scale = gpu.capacity.max(gpu.allocated).max(1) as f64;
    let cells = |bytes: u64| (bytes as f64 / scale * width as f64).round() as usize;
    let resident = cells(gpu.resident.min(gpu.capacity)).min(width);
    let elsewhere = cells(gpu.allocated.saturating_sub(gpu.resident)).min(width - resident);
    [resident, elsewhere, width - resident - elsewhere]
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / GIB as f64)
}

fn gpu_lines(top: &Top, gpu: &GpuStatus, width: usize, now: Instant) -> Vec<Line<'static>> {
    let name = format!("{} {}", show::gpu_name(gpu), gpu.name.clone().unwrap_or_default());
    let name = cut(name.trim(), 22);
    if gpu.capacity == 0 {
        return vec![Line::from(format!("{name:<22}  not used yet"))];
    }
    let figures =
        format!("{}/{} GiB, {} allocated", gib(gpu.resident), gib(gpu.capacity), gib(gpu.allocated));
    let room = width.saturating_sub(22 + 2 + figures.len() + 2).max(4);
    let [resident, elsewhere, free] = bar(gpu, room);
    let bar = vec![
        Span::raw(format!("{name:<22}  ")),
        Span::styled("█".repeat(resident), style(top, Color::Green)),
        Span::styled("▒".repeat(elsewhere), style(top, Color::Yellow)),
        Span::raw("·".repeat(free)),
        Span::raw(format!("  {figures}")),
    ];
    let list = |ids: &[u64], others: u32, with: &dyn Fn(u64) -> String| {
        let own = ids.iter().map(|&id| with(id));
        let all: Vec<String> = own.chain((others > 0).then(|| format!("+{others}"))).collect();
        if all.is_empty() { "nobody".to_owned() } else { all.join(", ") }
    };
    let others = gpu.others.unwrap_or_default();
    let holders = list(&gpu.holders, others.holders, &|id| id.to_string());
    let waiters = list(&gpu.waiters, others.waiters, &|id| {
        let waits = top.clients.get(&id).and_then(|history| history.waits(now));
        waits.map_or_else(|| id.to_string(), |waits| format!("{id} ({} s)", waits.as_secs()))
    });
    let text = format!("  held by {holders}; waiting: {waiters}; TQ {} s", show::seconds(gpu.quantum_ms));
    vec![Line::from(bar), Line::from(cut(&text, width))]
}

/// The last samples as a line; `most` is its full height.
fn spark(samples: &VecDeque<u64>, most: u64) -> String {
    let skip = samples.len().saturating_sub(SPARK);
    let step = |&sample: &u64| match sample {
        0 => ' ',
        sample => STEPS[(sample.saturating_mul(7) / most.max(1)).min(7) as usize],
    };
    let line: String = samples.iter().skip(skip).map(step).collect();
    format!("{line:>SPARK$}")
}

/// The table of the clients.
struct Rows {
    head: Vec<Line<'static>>,
    clients: Vec<Line<'static>>,
    selected: Option<usize>,
}

impl Rows {
    /// Removes rows in front until the selected one is among the first `room`; returns how many.
    fn skip(&mut self, room: usize) -> usize {
        let room = room.max(1);
        let skipped = match self.selected {
            Some(at) if self.clients.len() > room => (at + 1).saturating_sub(room),
            _ => 0,
        };
        self.clients.drain(..skipped);
        skipped
    }
}

fn clients(top: &Top, clients: &[ClientStatus], width: usize, now: Instant) -> Rows {
    let shown: Vec<&ClientStatus> = clients.iter().filter(|client| !client.gone).collect();
    if shown.is_empty() {
        return Rows { head: vec![Line::from("no clients")], clients: Vec::new(), selected: None };
    }
    let selected = shown.iter().position(|client| Some(client.client) == top.selected);
    let most = top.clients.values().flat_map(|history| history.moved.iter().copied()).max().unwrap_or(0);
    // Width that is left for the program beside the other columns.
    let fixed = 1 + 4 + 1 + 9 + 1 + 10 + 1 + SPARK + 1 + SPARK + 1 + 6 + 1;
    let with_sparks = width >= fixed + 12;
    let program =
        if with_sparks { width - fixed } else { width.saturating_sub(fixed - 2 * SPARK - 2).max(8) };
    let head = |held: &str, moved: &str| {
        format!(
            "{:>5} {:<9} {:<program$} {:>10} {held}{moved}{:>6}",
            "ID", "STATE", "PROGRAM", "ALLOCATED", "WAITS"
        )
    };
    let head = if with_sparks {
        head(&format!("{:>SPARK$} ", "HELD"), &format!("{:>SPARK$} ", "MOVED"))
    } else {
        head("", "")
    };
    let head = vec![Line::styled(cut(&head, width), Style::new().add_modifier(Modifier::REVERSED))];
    let mut lines = Vec::with_capacity(shown.len());
    for client in shown {
        let history = top.clients.get(&client.client);
        let sparks =
            |history: &History| format!("{} {} ", spark(&history.held, 1000), spark(&history.moved, most));
        let sparks = match history {
            Some(history) if with_sparks => sparks(history),
            _ if with_sparks => " ".repeat(2 * SPARK + 2),
            _ => String::new(),
        };
        let seats = top.status.as_ref().map_or(&[][..], |status| &status.seats);
        let shown_as = show::occupant(seats, client.client).unwrap_or_else(|| {
            client
                .process
                .as_ref()
                .map_or_else(|| client.name.clone(), |process| short_command(&process.command))
        });
        let waited = history.filter(|_| waits(client)).and_then(|history| history.waits(now));
        let waited = waited.map(|waited| format!("{} s", waited.as_secs())).unwrap_or_default();
        let state = match client {
            _ if client.stuck => "STUCK",
            _ => show::client_state(client),
        };
        let is_selected = Some(client.client) == top.selected;
        let text = format!(
            "{}{:>4} {state:<9} {:<program$} {:>10} {sparks}{waited:>6}",
            if is_selected { '>' } else { ' ' },
            client.client,
            cut(&shown_as, program),
            Bytes(show::allocated(client)).to_string()
        );
        let colour = match client.state {
            _ if client.stuck => Color::Red,
            ClientState::Running | ClientState::Free => Color::Green,
            ClientState::Restoring | ClientState::Draining | ClientState::Next => Color::Cyan,
            ClientState::Waiting => Color::Yellow,
            ClientState::Blocked | ClientState::Left => Color::Red,
            ClientState::Parked | ClientState::Idle | ClientState::Gone | ClientState::Asleep => Color::Reset,
        };
        let style = style(top, colour);
        let style = if is_selected { style.add_modifier(Modifier::BOLD) } else { style };
        lines.push(Line::styled(cut(text.trim_end(), width), style));
    }
    Rows { head, clients: lines, selected }
}

/// The prompt line: the setting, and the text typed so far.
fn prompt(prompt: &Prompt) -> String {
    let what = match prompt.what {
        Typed::Quantum => "quantum of every GPU in seconds".to_owned(),
        Typed::Weight(client) => format!("weight of client {client}"),
        Typed::Compute(client) => format!("compute limit of client {client} in %, or none"),
        Typed::Memory(client) => format!("memory limit of client {client}, or none"),
    };
    format!("{what}: {}_  (Enter sets it, Esc does not)", prompt.text)
}

/// The settings of the selected client, and the keys that change them.
fn about(client: &ClientStatus) -> String {
    let share = &client.share;
    let compute = share.compute.iter().map(|limit| limit.percent).min();
    let compute = compute.map_or_else(|| "none".to_owned(), |percent| format!("{percent} %"));
    let memory = client.usage.iter().map(|usage| usage.limit).filter(|&limit| limit > 0).min();
    let memory = memory.map_or_else(|| "none".to_owned(), |limit| Bytes(limit).to_string());
    let pause = if share.paused { "let it go on" } else { "pause" };
    format!(
        "client {}:  w weight {}  l limit {compute}  m memory {memory}  p {pause}",
        client.client, share.weight
    )
}

fn footer(top: &Top, width: usize) -> Line<'static> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    if let Some(typed) = &top.prompt {
        return Line::styled(cut(&prompt(typed), width), bold);
    }
    if let Some(message) = &top.message {
        return Line::styled(cut(message, width), bold);
    }
    if let Some(client) = top.selected.and_then(|id| top.client(id)).filter(|_| !top.shows_keys) {
        return Line::styled(cut(&about(client), width), style(top, Color::DarkGray));
    }
    let on = top.status.as_ref().is_none_or(|status| status.scheduler.scheduling);
    let sort = clap::ValueEnum::to_possible_value(&top.sort).map(|value| value.get_name().to_owned());
    let text = format!(
        "q quit  ? keys  ↓ client  s sort by {}  t set TQ  o scheduling {}",
        sort.unwrap_or_default(),
        if on { "off" } else { "on" }
    );
    Line::styled(cut(&text, width), style(top, Color::DarkGray))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::keys::Key;
    use crate::top::tests::{GIB, client, status};
    use nvshare_admin::Status;
    use nvshare_proto::{GpuUuid, Occupant, Seat, SeatStatus, Slot, TenantSettings};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::Duration;

    fn top() -> (Top, Instant) {
        let (mut top, begin) = (Top::new(false), Instant::now());
        for i in 0..8 {
            let first = client(1, ClientState::Running, i * i * 20, 0);
            let second = client(2, ClientState::Waiting, 0, i * GIB);
            top.look(Ok(status(vec![first, second])), begin + Duration::from_secs(i));
        }
        (top, begin + Duration::from_secs(9))
    }

    fn screen(top: &Top, now: Instant, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, top, now)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| row(y).trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn a_client_of_a_seat_is_shown_as_its_pod() {
        let seat =
            Seat { slots: vec![Slot { gpu: GpuUuid([7; 16]), number: 0 }], given: TenantSettings::default() };
        let occupant = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
        let held = SeatStatus { name: seat.name(), seat, occupant: Some(occupant), clients: vec![2] };
        let (mut top, now) = top();
        let clients = vec![client(1, ClientState::Running, 0, 0), client(2, ClientState::Waiting, 0, 0)];
        top.look(Ok(Status { seats: vec![held], ..status(clients) }), now);
        let screen = screen(&top, now, 100, 20);
        assert_eq!(screen.matches("lab/train-0/main").count(), 1, "{screen}");
    }

    #[test]
    fn a_screen_of_80_columns() {
        let (top, now) = top();
        assert_eq!(
            screen(&top, now, 80, 10),
            "\
nvshare-scheduler 0.1.0  up 61 s  scheduling on  TQ 30 s
GPU 0 Tesla T4          █████████████▒▒▒▒▒▒▒▒▒▒▒▒  12.0/16.0 GiB, 24.0 allocated
  held by 1; waiting: 2 (9 s); TQ 30 s

   ID STATE     PROGRAM                   ALLOCATED       HELD      MOVED  WAITS
    1 running   job1                      12.00 GiB    ▁▁▁▁▂▂▂
    2 waiting   job2                      12.00 GiB               ███████    9 s


q quit  ? keys  ↓ client  s sort by client  t set TQ  o scheduling off
"
        );
    }

    #[test]
    fn the_selected_client_is_marked_and_what_it_has_is_said() {
        let (mut top, now) = top();
        top.press(Key::Up);
        if let Some(status) = &mut top.status {
            status.clients[1].share =
                nvshare_proto::ShareStatus { weight: 400, paused: true, ..Default::default() };
            status.clients[1].usage[0].limit = GIB;
        }
        let text = screen(&top, now, 80, 10);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[5].starts_with("    1 running "), "{text}");
        assert!(lines[6].starts_with(">   2 paused "), "{text}");
        assert_eq!(lines[9], "client 2:  w weight 400  l limit none  m memory 1.00 GiB  p let it go on");
        for (key, asks) in [
            ('w', "weight of client 2: 4_  (Enter sets it, Esc does not)"),
            ('l', "compute limit of client 2 in %, or none: 4_  (Enter sets it, Esc does not)"),
            ('m', "memory limit of client 2, or none: 4_  (Enter sets it, Esc does not)"),
        ] {
            top.press(Key::Char(key));
            top.press(Key::Char('4'));
            assert_eq!(screen(&top, now, 80, 10).lines().last(), Some(asks));
            top.press(Key::Escape);
        }
    }

    #[test]
    fn all_keys_are_shown() {
        let (mut top, now) = top();
        top.press(Key::Char('?'));
        let text = screen(&top, now, 80, 24);
        assert!(HELP.lines().all(|line| text.contains(line)), "{text}");
        top.press(Key::Escape);
        assert!(screen(&top, now, 80, 24).contains("job1"));
    }

    #[test]
    fn a_terminal_that_is_too_small_is_told_so() {
        let (top, now) = top();
        assert_eq!(screen(&top, now, 20, 5), "20×5 is too small:\ntop needs 48×8\n\n\n\n");
        for (width, height) in [(1, 1), (47, 30), (200, 7), (48, 8), (60, 9), (300, 60)] {
            assert!(!screen(&top, now, width, height).trim().is_empty());
        }
    }

    #[test]
    fn a_scheduler_that_is_away_is_said_to_be() {
        let (mut top, now) = top();
        top.look(Err("no scheduler answers at /x".to_owned()), now);
        let text = screen(&top, now, 80, 10);
        assert!(
            text.starts_with(
                "no scheduler: it is looked for; what follows is old (no scheduler answers at /x)\n"
            ),
            "{text}"
        );
        assert!(text.contains("job1"), "{text}");
    }

    #[test]
    fn a_thousand_clients_with_long_names_are_cut_short() {
        let mut top = Top::new(true);
        let long = |id| ClientStatus { name: "x".repeat(300), ..client(id, ClientState::Waiting, 0, 0) };
        top.look(Ok(status((1..=1000).map(long).collect())), Instant::now());
        let text = screen(&top, Instant::now(), 80, 24);
        assert!(text.contains("… 983 more lines"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        // The selected one is in sight, wherever it is.
        for selected in [1, 17, 18, 500, 999, 1000] {
            top.selected = Some(selected);
            let text = screen(&top, Instant::now(), 80, 24);
            assert!(text.contains(&format!(">{selected:>4} waiting")), "{selected}: {text}");
            let shown = text.lines().filter(|line| line.contains(" waiting ")).count();
            assert!(text.contains(&format!("… {} more lines", 1000 - shown)), "{selected}: {text}");
        }
    }
}
