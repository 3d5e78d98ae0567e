//! `make demo`: unmodified programs on a mount, and on two nodes, with kills in the middle.
//!
//! At the end of each story it counts the acknowledged results. `ashlar-demo one` and `ashlar-demo two` tell one story.
#![forbid(unsafe_code)]

mod jobs;
mod node;
mod one_node;
mod running;
mod story;
mod two_nodes;

use std::process::ExitCode;

use ashlar_tests::Outcome;
use ashlar_tests::command::program;
use ashlar_tests::mount::{clear_behind, obstacle};

/// Tells a story, and fails if anything in it is not as promised.
type Telling = fn() -> Outcome;

/// The stories, in their order.
const STORIES: &[(&str, Telling)] = &[("one", one_node::tell), ("two", two_nodes::tell)];

fn main() -> ExitCode {
    let wanted: Vec<_> = std::env::args().skip(1).collect();
    if let Some(unknown) = wanted.iter().find(|name| !STORIES.iter().any(|(known, _)| known == name)) {
        eprintln!("demo: no story is called {unknown}; 'ashlar-demo [one] [two]'");
        return ExitCode::FAILURE;
    }
    if let Some(why) = obstacle() {
        eprintln!("demo: can't run here: {why}");
        return ExitCode::FAILURE;
    }
    println!("Ashlar demo: {}", program().display());
    for (name, tell) in STORIES {
        if !wanted.is_empty() && !wanted.iter().any(|it| it == name) {
            continue;
        }
        let result = tell();
        // A story that failed in the middle may leave processes and mounts.
        clear_behind(std::process::id());
        if let Err(error) = result {
            println!("\nFAILED: {error}");
            return ExitCode::FAILURE;
        }
    }
    println!("\neverything that was acknowledged is there");
    ExitCode::SUCCESS
}
