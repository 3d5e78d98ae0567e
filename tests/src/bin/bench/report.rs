//! Medians and ratios of the contenders.

use serde_json::{Value, json};

use crate::cases::Time;
use crate::contenders::Contenders;

/// The table marks a speed below this part of the bar's.
const BAR: f64 = 0.8;

/// One line of the table: the action, and each contender's speed in each round.
#[derive(Debug)]
struct Line {
    action: &'static str,
    unit: &'static str,
    bar: bool,
    /// Speeds by contender and round.
    speeds: Vec<Vec<f64>>,
}

/// All that was measured.
#[derive(Debug)]
pub struct Report {
    names: Vec<&'static str>,
    lines: Vec<Line>,
    memory: Vec<(&'static str, Vec<(String, u64)>)>,
}

impl Report {
    /// An empty report.
    pub fn new(contenders: &Contenders) -> Self {
        Self { names: contenders.names(), lines: Vec::new(), memory: Vec::new() }
    }

    /// Records a contender's speed. Within a round every contender has its turn, so the rounds of all line up.
    pub fn add(&mut self, name: &str, _round: u64, time: Time) {
        let Some(contender) = self.names.iter().position(|known| *known == name) else { return };
        let at = self.lines.iter().position(|line| line.action == time.action).unwrap_or_else(|| {
            let speeds = vec![Vec::new(); self.names.len()];
            self.lines.push(Line { action: time.action, unit: time.unit, bar: time.bar, speeds });
            self.lines.len() - 1
        });
        self.lines[at].speeds[contender].push(time.speed);
    }

    /// Records the processes' private memory.
    pub fn record_memory(&mut self, when: &'static str, processes: &[(String, u64)]) {
        self.memory.push((when, processes.to_vec()));
    }

    /// The report for people.
    pub fn table(&self) -> String {
        let mut text = format!("{:34} {:8}", "", "");
        for name in &self.names {
            text += &format!(" {name:>14}");
        }
        text += &format!("   ashlar : {} (of the rounds)\n", self.names[1]);
        for line in &self.lines {
            text += &format!("{:34} {:8}", line.action, line.unit);
            for speeds in &line.speeds {
                text += &format!(" {:>14.0}", median(speeds));
            }
            let ratios = ratios(line);
            let (least, most) = ratios.iter().fold((f64::MAX, 0.0), |(l, m): (f64, f64), r| (l.min(*r), m.max(*r)));
            let verdict = if line.bar && median(&ratios) < BAR { "  below the bar" } else { "" };
            text += &format!("   {:5.2} ({least:.2} to {most:.2}){verdict}\n", median(&ratios));
        }
        for (when, processes) in &self.memory {
            let total: u64 = processes.iter().map(|(_, bytes)| bytes).sum();
            text += &format!("private memory, {when}: {:.1} MiB", mebibytes(total));
            let parts: Vec<_> = processes.iter().map(|(name, b)| format!("{name} {:.1}", mebibytes(*b))).collect();
            text += &format!(" ({})\n", parts.join(", "));
        }
        text
    }

    /// The report for machines: the medians, and every round.
    pub fn json(&self) -> Value {
        let line = |line: &Line| {
            let speed = |contender: usize| json!({ "median": median(&line.speeds[contender]), "rounds": line.speeds[contender] });
            let speeds = self.names.iter().enumerate().map(|(at, name)| ((*name).to_owned(), speed(at)));
            json!({
                "what": line.action,
                "unit": line.unit,
                "ratio": median(&ratios(line)),
                "speeds": speeds.collect::<serde_json::Map<_, _>>(),
            })
        };
        let memory =
            |(when, processes): &(&str, Vec<(String, u64)>)| json!({ "when": when, "private_bytes": processes });
        json!({
            "bar": self.names[1],
            "lines": self.lines.iter().map(line).collect::<Vec<_>>(),
            "memory": self.memory.iter().map(memory).collect::<Vec<_>>(),
        })
    }
}

fn ratios(line: &Line) -> Vec<f64> {
    line.speeds[0].iter().zip(&line.speeds[1]).map(|(ours, theirs)| ours / theirs).collect()
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The value in the middle; of an even number of values, the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
