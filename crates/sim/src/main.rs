//! `ashlar-sim`: runs seeds of the simulator, replays one, and makes a failing one short.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use ashlar_sim::faults::{FaultKind, SimBug};
use ashlar_sim::minimize::minimize;
use ashlar_sim::simulation::{STEPS, SimCounts, SimOptions, run_seed};
use clap::Parser;
use clap::builder::PossibleValuesParser;

/// Runs the simulator: one machine, or one with a replica, under faults, from one seed.
#[derive(Debug, Parser)]
#[command(name = "ashlar-sim", version)]
struct SimArguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 100, value_name = "N")]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0, value_name = "N")]
    from: u64,
    /// Run one seed, and print its trace.
    #[arg(long, value_name = "N", conflicts_with = "minimize")]
    seed: Option<u64>,
    /// Make a failing seed short, and print the short trace.
    #[arg(long, value_name = "N")]
    minimize: Option<u64>,
    /// Operations of all clients in a run.
    #[arg(long, default_value_t = STEPS, value_name = "N")]
    steps: u64,
    /// A kind of fault that does not happen; may be given several times.
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(FaultKind::ALL.map(FaultKind::name)))]
    without: Vec<String>,
    /// Plant a bug, which a check must find.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(SimBug::ALL.map(SimBug::name)))]
    plant: Option<String>,
    /// List the bugs that can be planted.
    #[arg(long)]
    plants: bool,
}

impl SimArguments {
    fn options(&self, seed: u64) -> SimOptions {
        let mut options = SimOptions::new(seed);
        options.steps = self.steps;
        options.plant = self.plant.as_deref().and_then(SimBug::of_name);
        for kind in FaultKind::ALL.into_iter().filter(|kind| self.without.iter().any(|name| name == kind.name())) {
            options.faults = options.faults.without(kind);
        }
        options
    }

    /// The arguments that repeat a run.
    fn command(&self, options: &SimOptions) -> String {
        let mut command = format!("cargo run --release -p ashlar-sim -- --seed {}", options.seed);
        if options.steps != STEPS {
            command += &format!(" --steps {}", options.steps);
        }
        for kind in FaultKind::ALL.into_iter().filter(|kind| !options.faults.has(*kind)) {
            command += &format!(" --without {kind}");
        }
        if let Some(plant) = &self.plant {
            command += &format!(" --plant {plant}");
        }
        command
    }
}

fn main() -> ExitCode {
    let arguments = SimArguments::parse();
    // A panic is a finding, and is printed as one.
    std::panic::set_hook(Box::new(|_| {}));
    if arguments.plants {
        SimBug::ALL.iter().for_each(|bug| println!("{}", bug.name()));
        return ExitCode::SUCCESS;
    }
    match (arguments.seed, arguments.minimize) {
        (Some(seed), _) => show(&arguments, arguments.options(seed)),
        (None, Some(seed)) => match minimize(arguments.options(seed)) {
            Some(options) => show(&arguments, options),
            None => {
                println!("seed {seed} breaks no check");
                ExitCode::SUCCESS
            }
        },
        (None, None) => run_seeds(&arguments),
    }
}

/// Runs a seed, and prints its trace.
fn show(arguments: &SimArguments, options: SimOptions) -> ExitCode {
    let outcome = run_seed(SimOptions { is_traced: true, ..options });
    outcome.trace.iter().for_each(|line| println!("{line}"));
    println!("seed {}: {}", options.seed, outcome.counts);
    let Some(broken) = outcome.broken else { return ExitCode::SUCCESS };
    println!("seed {} breaks a check: {broken}", options.seed);
    println!("repeat it: {}", arguments.command(&options));
    ExitCode::FAILURE
}

/// Runs many seeds, up to the first finding.
fn run_seeds(arguments: &SimArguments) -> ExitCode {
    let mut counts = SimCounts::default();
    for seed in arguments.from..arguments.from.saturating_add(arguments.seeds) {
        let options = arguments.options(seed);
        let outcome = run_seed(options);
        counts.add(&outcome.counts);
        if let Some(broken) = outcome.broken {
            println!("seed {seed} breaks a check: {broken}");
            println!("repeat it: {}", arguments.command(&options));
            return ExitCode::FAILURE;
        }
    }
    println!("{} seeds: {counts}", arguments.seeds);
    ExitCode::SUCCESS
}
