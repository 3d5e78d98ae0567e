//! The result of `ashlar bench fabric`, for people and in JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::case::{CARRIERS, Carrier, FSYNC_PATHS, FabricCase};
use crate::output::table::{grouped, table};
use crate::verbs::bench::report::{NONE, ratio, time};
use crate::verbs::bench::timing::{Summary, median};

/// The conditions of the measurement.
#[derive(Clone, Debug, Serialize)]
pub struct FabricSetting {
    /// The version of this program.
    pub version: &'static str,
    /// How often everything was measured.
    pub rounds: u64,
    /// Cores that this process may use.
    pub processors: usize,
    /// The time of one reading of the clock, which is part of each time of a single operation.
    pub clock_ns: f64,
}

/// All results.
#[derive(Debug)]
pub struct FabricReport {
    setting: FabricSetting,
    rounds: BTreeMap<(usize, Carrier), Vec<Summary>>,
}

/// The numbers of a contender in a case.
#[derive(Debug, Serialize)]
struct CarrierNumbers {
    p50_ns: f64,
    p99_ns: f64,
    max_ns: f64,
    mean_ns: f64,
    /// Bytes of streamed messages in a second, in millions.
    megabytes_per_second: Option<f64>,
    /// A round trip's p50, or the time of a stream, beside the plain socket's: the median of the rounds' ratios.
    to_socket: Option<f64>,
    rounds: Vec<Summary>,
}

/// A case in JSON.
#[derive(Debug, Serialize)]
struct CaseNumbers {
    what: String,
    bytes: usize,
    contenders: BTreeMap<Carrier, CarrierNumbers>,
}

/// The whole document.
#[derive(Debug, Serialize)]
struct FabricDocument<'a> {
    setting: &'a FabricSetting,
    cases: Vec<CaseNumbers>,
}

impl FabricReport {
    /// Makes an empty report.
    pub const fn new(setting: FabricSetting) -> Self {
        Self { setting, rounds: BTreeMap::new() }
    }

    /// Adds a contender's times of a round. Within a round each contender has its turn, so the rounds of all line up.
    pub fn add(&mut self, case: FabricCase, carrier: Carrier, summary: Summary) {
        if let Some(at) = FabricCase::ALL.iter().position(|other| *other == case) {
            self.rounds.entry((at, carrier)).or_default().push(summary);
        }
    }

    fn numbers(&self, at: usize, carrier: Carrier) -> Option<CarrierNumbers> {
        let rounds = self.rounds.get(&(at, carrier))?;
        let of = |number: fn(&Summary) -> f64| median(rounds.iter().map(number));
        let (case, mean_ns) = (FabricCase::ALL[at], of(|summary| summary.mean_ns)?);
        let is_stream = matches!(case, FabricCase::Stream { .. });
        let ratio_to =
            |socket: &Vec<Summary>| median(rounds.iter().zip(socket).map(|(ours, theirs)| ours.p50_ns / theirs.p50_ns));
        Some(CarrierNumbers {
            p50_ns: of(|summary| summary.p50_ns)?,
            p99_ns: of(|summary| summary.p99_ns)?,
            max_ns: rounds.iter().map(|summary| summary.max_ns).fold(0.0, f64::max),
            mean_ns,
            megabytes_per_second: is_stream.then(|| case.bytes() as f64 * 1e3 / mean_ns),
            to_socket: self.rounds.get(&(at, Carrier::Socket)).and_then(ratio_to),
            rounds: rounds.clone(),
        })
    }

    /// Returns the report in JSON.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        let case_numbers = |(at, case): (usize, &FabricCase)| CaseNumbers {
            what: case.name(),
            bytes: case.bytes(),
            contenders: case
                .carriers()
                .iter()
                .filter_map(|carrier| Some((*carrier, self.numbers(at, *carrier)?)))
                .collect(),
        };
        let cases = FabricCase::ALL.iter().enumerate().map(case_numbers).collect();
        serde_json::to_string_pretty(&FabricDocument { setting: &self.setting, cases })
    }

    /// Returns the report for people.
    pub fn text(&self) -> String {
        let FabricSetting { version, rounds, processors, clock_ns } = &self.setting;
        let plural = if *rounds == 1 { "round" } else { "rounds" };
        let mut text = format!("ashlar {version}: links between two processes of this machine, TCP over loopback\n");
        text += &format!(
            "method  {rounds} {plural} in turn, medians; {processors} cores; the clock takes {clock_ns:.0} ns\n\n"
        );
        text += &self.round_trips();
        text += "\n";
        text += &self.streams();
        text += "\n";
        text += &self.fsyncs();
        text
    }

    /// Formats the cases of a kind.
    fn rows(&self, is_wanted: impl Fn(&FabricCase) -> bool, cells: impl Fn(usize) -> Vec<String>) -> Vec<Vec<String>> {
        let cases = FabricCase::ALL.iter().enumerate().filter(|(_, case)| is_wanted(case));
        cases.map(|(at, case)| [vec![case.size_name()], cells(at)].concat()).collect()
    }

    fn cell(&self, at: usize, carrier: Carrier, format: impl Fn(&CarrierNumbers) -> Option<String>) -> String {
        self.numbers(at, carrier).as_ref().and_then(format).unwrap_or_else(|| NONE.to_owned())
    }

    /// Formats how a carrier compares with the plain socket.
    fn ratios(&self, at: usize) -> impl Iterator<Item = String> {
        let links = [Carrier::Fabric, Carrier::FabricTls].into_iter();
        links.map(move |carrier| self.cell(at, carrier, |numbers| numbers.to_socket.map(ratio)))
    }

    fn round_trips(&self) -> String {
        let cells = |at| {
            let times = CARRIERS.into_iter().flat_map(|carrier| {
                [|n: &CarrierNumbers| n.p50_ns, |n: &CarrierNumbers| n.p99_ns]
                    .map(|of| self.cell(at, carrier, |numbers| Some(time(of(numbers)))))
            });
            times.chain(self.ratios(at)).collect()
        };
        let rows = self.rows(|case| matches!(case, FabricCase::RoundTrip { .. }), cells);
        let header =
            ["ROUND TRIP", "SOCKET p50", "p99", "FABRIC p50", "p99", "TLS p50", "p99", "FABRIC/SOCKET", "TLS/SOCKET"];
        table(&header, &rows)
    }

    fn streams(&self) -> String {
        let speed = |numbers: &CarrierNumbers| {
            numbers.megabytes_per_second.map(|speed| format!("{} MB/s", grouped(speed.round() as u64)))
        };
        let cells =
            |at| CARRIERS.map(|carrier| self.cell(at, carrier, speed)).into_iter().chain(self.ratios(at)).collect();
        let rows = self.rows(|case| matches!(case, FabricCase::Stream { .. }), cells);
        // The ratios are of times, as above.
        table(&["STREAM OF", "SOCKET", "FABRIC", "TLS", "FABRIC/SOCKET", "TLS/SOCKET"], &rows)
            + "Ratios are of times: above 1 is slower than the plain socket.\n"
    }

    fn fsyncs(&self) -> String {
        let times = |numbers: &CarrierNumbers| [numbers.p50_ns, numbers.p99_ns].map(time);
        let cells = |at| {
            let pair = |carrier| self.numbers(at, carrier).map_or([NONE; 2].map(str::to_owned), |it| times(&it));
            FSYNC_PATHS.into_iter().flat_map(pair).collect()
        };
        let rows = self.rows(|case| matches!(case, FabricCase::Fsync { .. }), cells);
        table(&["FLOOR OF AN FSYNC OVER TWO NODES", "p50", "p99", "OF IT, THIS NODE p50", "p99"], &rows)
            + "Futex, plain socket, memory of the peer, and back; this node's part is the futex there and back.\n"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn ratio_is_median_of_rounds_and_stream_has_speed() {
        let mut report = FabricReport::new(FabricSetting { version: "0", rounds: 3, processors: 2, clock_ns: 20.0 });
        let summary = |ns| Summary { count: 9, batch: 1, p50_ns: ns, p99_ns: 2.0 * ns, max_ns: 3.0 * ns, mean_ns: ns };
        let (trip, stream, fsync) = (FabricCase::ALL[0], FabricCase::ALL[3], FabricCase::ALL[4]);
        for (socket, fabric) in [(1e4, 2e4), (2e4, 6e4), (4e4, 1e5)] {
            report.add(trip, Carrier::Socket, summary(socket));
            report.add(trip, Carrier::Fabric, summary(fabric));
        }
        report.add(stream, Carrier::Socket, summary(1_048_576.0));
        report.add(fsync, Carrier::Nodes, summary(7e4));
        let json: Value = serde_json::from_str(&report.json().expect("JSON")).expect("JSON");
        let fabric = &json["cases"][0]["contenders"]["fabric"];
        assert_eq!((fabric["p50_ns"].as_f64(), fabric["to_socket"].as_f64()), (Some(6e4), Some(2.5)));
        assert_eq!(fabric["rounds"].as_array().map(Vec::len), Some(3));
        let socket = &json["cases"][3]["contenders"]["socket"];
        assert_eq!(socket["megabytes_per_second"].as_f64(), Some(1000.0));
        let text = report.text();
        for word in ["60.00 us", "2.50", "1,000 MB/s", "70.00 us", "140.00 us"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
