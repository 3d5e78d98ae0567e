//! Medians, spreads and ratios of the places.

use std::fmt::Write;

use ashlar_tests::{Outcome, ensure};
use serde_json::{Value, json};

use super::job::{Measured, Unit};
use super::places::JobPlaces;
use crate::report::median;

/// One line of the table: the action, and each place's figure in each round.
#[derive(Debug)]
struct Line {
    action: String,
    unit: Unit,
    /// The finding, which is the same in all places.
    found: String,
    /// Figures by place and round.
    values: Vec<Vec<f64>>,
}

impl Line {
    /// How many times as fast as `other` a place is, by round.
    fn ratios(&self, place: usize, other: usize) -> Vec<f64> {
        let pairs = self.values[place].iter().zip(&self.values[other]);
        pairs.map(|(ours, theirs)| if self.unit.is_speed() { ours / theirs } else { theirs / ours }).collect()
    }
}

/// All that was measured.
#[derive(Debug)]
pub struct Table {
    /// Name and description of each place.
    places: Vec<(&'static str, String)>,
    rounds: u64,
    lines: Vec<Line>,
    left_out: Vec<(&'static str, String)>,
}

impl Table {
    /// An empty table.
    pub fn new(places: &JobPlaces, rounds: u64) -> Self {
        let places = places.all().iter().map(|place| (place.name, place.description.clone())).collect();
        Self { places, rounds, lines: Vec::new(), left_out: Vec::new() }
    }

    /// Records that a job could not be measured.
    pub fn leave_out(&mut self, job: &'static str, reason: String) {
        self.left_out.push((job, reason));
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.places.iter().position(|(known, _)| *known == name)
    }

    /// Records a figure of a place. Fails if the finding differs from that of another place, or if no time was taken.
    pub fn add(&mut self, place: &str, measured: Measured) -> Outcome {
        let Some(column) = self.place(place) else { return Err(format!("there is no place '{place}'")) };
        let Measured { action, unit, value, found } = measured;
        ensure!(value.is_finite() && value > 0.0, "{action} on {place} was measured as {value}");
        let at = self.lines.iter().position(|line| line.action == action).unwrap_or_else(|| {
            let values = vec![Vec::new(); self.places.len()];
            self.lines.push(Line { action: action.clone(), unit, found: found.clone(), values });
            self.lines.len() - 1
        });
        let line = &mut self.lines[at];
        ensure!(line.found == found, "{action} on {place}: found {found}, but {} before", line.found);
        line.values[column].push(value);
        Ok(())
    }

    fn ratio(&self, line: &Line, to: &str) -> f64 {
        let (run, other) = (self.place("run").unwrap_or(0), self.place(to).unwrap_or(0));
        median(&line.ratios(run, other))
    }

    /// The table for people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string can't fail.
        for (name, description) in &self.places {
            let _ = writeln!(text, "{name:6} {description}");
        }
        let rounds = self.rounds;
        let _ = writeln!(
            text,
            "Medians of {rounds} rounds (least to greatest). disk/run, FUSE/run: how many times as fast run is.\n"
        );
        let _ = write!(text, "{:36} {:5}", "", "unit");
        for (name, _) in &self.places {
            let _ = write!(text, " {name:>24}");
        }
        let _ = writeln!(text, " {:>9} {:>9}   found", "disk/run", "FUSE/run");
        for line in &self.lines {
            let _ = write!(text, "{:36} {:5}", line.action, line.unit.name());
            for values in &line.values {
                let _ = write!(text, " {:>24}", cell(values));
            }
            let ratios = ["disk", "FUSE"].map(|to| self.ratio(line, to));
            let _ = writeln!(text, " {:>9.2} {:>9.2}   {}", ratios[0], ratios[1], line.found);
        }
        for (job, reason) in &self.left_out {
            let _ = writeln!(text, "not measured: {job}: {reason}");
        }
        text
    }

    /// The table for machines: the medians, and every round.
    pub fn json(&self) -> Value {
        let line = |line: &Line| {
            let values = self.places.iter().zip(&line.values);
            let values = values
                .map(|((name, _), values)| ((*name).to_owned(), json!({ "median": median(values), "rounds": values })));
            json!({
                "what": line.action,
                "unit": line.unit.name(),
                "more_is_better": line.unit.is_speed(),
                "found": line.found,
                "places": values.collect::<serde_json::Map<_, _>>(),
                "disk_to_run": self.ratio(line, "disk"),
                "fuse_to_run": self.ratio(line, "FUSE"),
            })
        };
        let of = |pairs: &[(&'static str, String)]| {
            pairs.iter().map(|(name, text)| ((*name).to_owned(), json!(text))).collect::<serde_json::Map<_, _>>()
        };
        json!({
            "places": of(&self.places),
            "lines": self.lines.iter().map(line).collect::<Vec<_>>(),
            "left_out": of(&self.left_out),
        })
    }
}

fn cell(values: &[f64]) -> String {
    let (least, most) = values.iter().fold((f64::MAX, 0.0), |(l, m): (f64, f64), v| (l.min(*v), m.max(*v)));
    match values {
        [] => "-".into(),
        [one] => number(*one),
        _ => format!("{} ({} to {})", number(median(values)), number(least), number(most)),
    }
}

/// A figure with three significant digits.
fn number(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let places = ["disk", "tmpfs", "FUSE", "run"].map(|name| (name, String::new()));
        Table { places: places.into(), rounds: 1, lines: Vec::new(), left_out: Vec::new() }
    }

    fn measured(unit: Unit, value: f64, found: &str) -> Measured {
        Measured { action: "it".into(), unit, value, found: found.into() }
    }

    #[test]
    fn ratios_say_how_many_times_as_fast_run_is() {
        for (unit, run) in [(Unit::Seconds, 2.0), (Unit::PerSecond, 8.0)] {
            let mut table = table();
            for (place, value) in [("disk", 4.0), ("tmpfs", 4.0), ("FUSE", 4.0), ("run", run)] {
                table.add(place, measured(unit, value, "all")).unwrap();
            }
            assert_eq!(table.json()["lines"][0]["disk_to_run"], 2.0);
            assert!(table.text().contains("2.00"));
        }
    }

    #[test]
    fn places_that_find_something_else_are_refused() {
        let mut table = table();
        table.add("disk", measured(Unit::Seconds, 1.0, "500 rows")).unwrap();
        let complaint = table.add("run", measured(Unit::Seconds, 1.0, "499 rows")).unwrap_err();
        assert!(complaint.contains("499 rows") && complaint.contains("run"), "{complaint}");
        assert!(table.add("run", measured(Unit::Seconds, 0.0, "500 rows")).is_err());
    }
}
