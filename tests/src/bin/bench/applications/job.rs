//! A job, and its turns: it prepares its inputs once, and then runs in every place.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::{Outcome, tried};

use super::places::{JobPlace, JobPlaces};
use super::program;
use super::size::Size;

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Microseconds for one operation.
    Micros,
    /// Operations a second.
    PerSecond,
}

impl Unit {
    /// The unit's name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Micros => "us/op",
            Self::PerSecond => "op/s",
        }
    }

    /// Whether more is better.
    pub const fn is_speed(self) -> bool {
        matches!(self, Self::PerSecond)
    }
}

/// A figure of one place in one round.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The measured action.
    pub action: String,
    /// Its unit.
    pub unit: Unit,
    /// The figure.
    pub value: f64,
    /// The finding afterwards, which must be the same in all places.
    pub found: String,
}

/// A job of programs.
#[derive(Debug)]
pub struct Job {
    /// Its name.
    pub name: &'static str,
    /// Programs that the job needs.
    pub programs: &'static [&'static str],
    /// Makes the inputs for all places, in a directory in memory.
    pub prepare: fn(&Path, Size) -> Outcome,
    /// Runs the job in one place.
    pub run: fn(&Turn) -> Outcome<Vec<Measured>>,
}

impl Job {
    /// Makes its inputs; fails if a program that it needs is missing.
    pub fn prepare(&self, inputs: &Path, size: Size) -> Outcome {
        let directories = std::env::var_os("PATH").unwrap_or_default();
        let found = |program: &str| std::env::split_paths(&directories).any(|at| at.join(program).exists());
        if let Some(missing) = self.programs.iter().find(|program| !found(program)) {
            return Err(format!("there is no {missing}, which 'scripts/setup.sh bench' installs"));
        }
        (self.prepare)(inputs, size)
    }
}

/// A job in a place, in a new directory. A drop removes the directory.
pub struct Turn<'a> {
    job: &'a Job,
    place: &'a JobPlace,
    /// All places, whose background work must have settled.
    pub places: &'a JobPlaces,
    /// The job's inputs.
    pub inputs: &'a Path,
    /// The amount of work.
    pub size: Size,
    /// The new directory.
    pub directory: PathBuf,
}

impl<'a> Turn<'a> {
    /// Makes the directory.
    pub fn new(
        job: &'a Job,
        place: &'a JobPlace,
        places: &'a JobPlaces,
        inputs: &'a Path,
        size: Size,
    ) -> Outcome<Self> {
        let directory = place.root.join("turn");
        std::fs::create_dir(&directory).map_err(tried(format!("making {}", directory.display())))?;
        Ok(Self { job, place, places, inputs, size, directory })
    }

    /// Runs the job.
    pub fn run(&self) -> Outcome<Vec<Measured>> {
        let measured = (self.job.run)(self).map_err(tried(format!("{} on {}", self.job.name, self.place.name)))?;
        std::fs::remove_dir_all(&self.directory).map_err(tried("removing the job's directory"))?;
        Ok(measured)
    }

    /// A program in the directory, started in this place's way, without variables that the user has set for other
    /// purposes.
    pub fn command<S: AsRef<OsStr>>(&self, program: S) -> Command {
        let mut command = self.place.front.command(program);
        self.environment(&mut command);
        command
    }

    /// A program in the directory without Ashlar's library: for unmeasured work, and to read the results.
    pub fn plainly(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        self.environment(&mut command);
        command
    }

    fn environment(&self, command: &mut Command) {
        command.current_dir(&self.directory).env("HOME", self.inputs).env("LC_ALL", "C");
        command.env("GIT_CONFIG_NOSYSTEM", "1").env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
        for from_make in ["MAKEFLAGS", "MAKELEVEL", "MFLAGS"] {
            command.env_remove(from_make);
        }
    }

    /// Runs a program without work in the background; returns its seconds and its output.
    pub fn time(&self, command: &mut Command) -> Outcome<(f64, String)> {
        self.places.settle()?;
        let (took, output) = program::time(command)?;
        Ok((took.as_secs_f64(), output))
    }

    /// Returns the output of a program that is not measured.
    pub fn output_of(&self, command: &mut Command) -> Outcome<String> {
        Ok(program::time(command)?.1)
    }
}

/// Makes a figure in seconds.
pub fn seconds(action: &str, value: f64, found: String) -> Measured {
    Measured { action: action.into(), unit: Unit::Seconds, value, found }
}
