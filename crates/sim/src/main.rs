//! `ashlar-sim`: runs seeds of the simulator.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use ashlar_sim::faults::SimBug;
use ashlar_sim::simulation::{SimCounts, SimOptions, run_seed};
use clap::Parser;

/// Runs the simulator.
#[derive(Debug, Parser)]
#[command(name = "ashlar-sim")]
struct SimArguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 100, value_name = "N")]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0, value_name = "N")]
    from: u64,
    /// Run one seed, and print its trace.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Plant a bug.
    #[arg(long, value_name = "NAME")]
    plant: Option<String>,
}

fn main() -> ExitCode {
    let arguments = SimArguments::parse();
    std::panic::set_hook(Box::new(|_| {}));
    let plant = arguments.plant.as_deref().and_then(SimBug::of_name);
    if let Some(seed) = arguments.seed {
        let outcome = run_seed(SimOptions { is_traced: true, plant, ..SimOptions::new(seed) });
        outcome.trace.iter().for_each(|line| println!("{line}"));
        println!("{}", outcome.counts);
        return match outcome.broken {
            Some(broken) => {
                println!("seed {seed} breaks a check: {broken}");
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        };
    }
    let mut counts = SimCounts::default();
    for seed in arguments.from..arguments.from + arguments.seeds {
        let outcome = run_seed(SimOptions { plant, ..SimOptions::new(seed) });
        counts.add(&outcome.counts);
        if let Some(broken) = outcome.broken {
            println!("seed {seed} breaks a check: {broken}");
            println!("replay it: cargo run --release -p ashlar-sim -- --seed {seed}");
            return ExitCode::FAILURE;
        }
    }
    println!("{} seeds: {counts}", arguments.seeds);
    ExitCode::SUCCESS
}
