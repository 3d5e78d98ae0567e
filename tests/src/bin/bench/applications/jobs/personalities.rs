//! Filebench's workloads, by the program in `crate::personality`.

use ashlar_tests::{Outcome, tried};
use serde_json::Value;

use crate::applications::job::{Measured, Turn, Unit};
use crate::applications::program;

/// A mail server's workload: small files, synced after each of two writes in a loop.
pub fn varmail(turn: &Turn) -> Outcome<Vec<Measured>> {
    run(turn, "varmail", turn.size.of(1000, 100), turn.size.of(50, 2))
}

/// A file server's workload: larger files, never synced. Filebench has 10,000.
pub fn fileserver(turn: &Turn) -> Outcome<Vec<Measured>> {
    run(turn, "fileserver", turn.size.of(2000, 300), turn.size.of(40, 1))
}

fn run(turn: &Turn, name: &str, files: u64, loops: u64) -> Outcome<Vec<Measured>> {
    let program = std::env::current_exe().map_err(tried("looking where this program is"))?;
    let mut command = turn.command(program);
    command.arg("personality").arg(name).arg(&turn.directory).args([files, loops].map(|number| number.to_string()));
    let said = program::time_itself(&mut command, || turn.places.settle())?;
    let result: Value =
        serde_json::from_str(&said).map_err(tried(format!("reading the output of {name}: '{said}'")))?;
    let speed = result["operations_a_second"].as_f64().ok_or("it prints no speed")?;
    let found = format!("{} operations", result["operations"]);
    Ok(vec![Measured { action: name.into(), unit: Unit::PerSecond, value: speed, found }])
}
