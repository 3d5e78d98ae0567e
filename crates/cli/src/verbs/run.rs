//! `ashlar run PROGRAM…`: runs a program, and all that it starts, with LibFS.

mod child_program;
mod refusals;
mod report;
mod system_calls;

use std::process::ExitCode;

use ashlar_launch::{PreparedProgram, exec_program, prepare_program, report_not_run};
use ashlar_wire::REPORT_VARIABLE;

use crate::arguments::RunArguments;
use crate::error::CliError;
use crate::verbs::run::refusals::find_refusals;
use crate::verbs::run::report::RunCounts;

/// Runs the program in place of this one, or as its child if a report is wanted. If nothing is mounted, the program
/// runs as it is.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, CliError> {
    let prepared = prepare_program(&arguments.command)?;
    prepared.warn_if_unmounted();
    if arguments.wants_report() {
        return run_with_report(arguments, prepared);
    }
    Ok(exec_program(prepared.command))
}

fn run_with_report(arguments: &RunArguments, prepared: PreparedProgram) -> Result<ExitCode, CliError> {
    let PreparedProgram { mut command, mounts } = prepared;
    let refused = find_refusals(&mounts);
    let counts = RunCounts::begin_count(mounts)?;
    command.env(REPORT_VARIABLE, counts.path());
    let child = match child_program::start_child(&mut command) {
        Ok(child) => child,
        Err(error) => return Ok(report_not_run(command.get_program(), &error)),
    };
    let end = child.wait()?;
    let words: Vec<_> = arguments.command.iter().map(|word| word.to_string_lossy()).collect();
    let written = counts
        .end_count(words.join(" "), refused)
        .and_then(|report| report.write(arguments.report_to.as_deref(), arguments.report_json));
    if let Err(error) = written {
        // The caller gets the program's own result.
        eprintln!("ashlar: {error}");
    }
    Ok(end.end_alike())
}
