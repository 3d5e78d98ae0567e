//! Programs that end so soon that they are run without the library, which is known by what they did the times before.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, Site, obstacle};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_wire::DEFER_VARIABLE;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/short_programs_go_without_the_library", run: || with(short) },
    Test { name: "run/who_runs_short_programs_is_served_as_before", run: || with(runner) },
];

/// Says whether it has the library. It makes so many calls on a file, or a process, where its first word says so.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int count, char **words) {
    struct stat found;
    const char *preload = getenv("LD_PRELOAD"), *other = getenv("OTHER");
    if (!other || strcmp(other, "kept") != 0) return 1;
    for (int i = 0; count > 2 && !strcmp(words[1], "-calls") && i < atoi(words[2]); i++)
        if (stat("file", &found) != 0) return 1;
    if (count > 1 && !strcmp(words[1], "-fork")) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        waitpid(child, NULL, 0);
    }
    puts(preload && strstr(preload, "libashlar_preload") ? "with" : "without");
    return 0;
}
"#;
/// How often it must have ended before that is believed.
const BELIEVED: usize = 8;
/// How often it's run then. One run in sixteen is looked at.
const TIMES: usize = 160;

fn with(test: fn() -> Outcome<Verdict>) -> Outcome<Verdict> {
    obstacle().map_or_else(test, |why| Ok(Verdict::Skipped(why)))
}

struct Place {
    site: Site,
    program: PathBuf,
}

impl Place {
    /// The program has a name that nobody knows yet: what others did is remembered on this machine.
    fn new(name: &str) -> Outcome<Self> {
        let site = Site::mounted(Medium::Memory, "64M")?;
        let program = site.outside().join(format!("{name}-{}", std::process::id()));
        let source = program.with_extension("c");
        fs::write(&source, PROGRAM).map_err(tried("writing a program"))?;
        run(Command::new("gcc").arg("-o").arg(&program).arg(&source))?.success()?;
        fs::write(site.point(0).join("file"), "x").map_err(tried("writing a file"))?;
        fs::write(site.point(0).join("large"), vec![0; 1 << 20]).map_err(tried("writing a file"))?;
        fs::create_dir(site.point(0).join("directory")).map_err(tried("making a directory"))?;
        Ok(Self { site, program })
    }

    /// What the program says of each of so many runs, on these arguments, out of a shell.
    fn runs(&self, shell: &str, times: usize, arguments: &str, settings: &[(&str, &str)]) -> Outcome<Vec<bool>> {
        let script = format!("for i in $(seq {times}); do {} {arguments} || exit 1; done", self.program.display());
        let mut command = Front::Run.command(shell);
        command.args(["-c", &script]).env("OTHER", "kept").envs(settings.iter().copied());
        let done = run(command.current_dir(self.site.point(0)))?.success()?;
        let said: Vec<_> = done.output.lines().map(|line| line == "with").collect();
        ensure!(said.len() == times, "{times} runs expected: {}", done.told());
        Ok(said)
    }

    fn end(self) -> Outcome<Verdict> {
        self.site.check()?;
        self.site.umount(0)?;
        passed()
    }
}

fn short() -> Outcome<Verdict> {
    let place = Place::new("short")?;
    // A shell that borrows its memory to programs, and one that copies it.
    for (shell, first) in [("sh", BELIEVED), ("bash", 0)] {
        let said = place.runs(shell, TIMES, "", &[])?;
        ensure!(said[..first].iter().all(|with| *with), "without the library in one of the first runs: {said:?}");
        let with = said[first..].iter().filter(|with| **with).count();
        ensure!((1..=TIMES / 4).contains(&with), "of {TIMES} short programs of {shell}, {with} have the library");
    }
    // What is much work is not known by what was done before.
    for much in ["large", "-x directory", "<large"] {
        let said = place.runs("sh", 2 * BELIEVED, much, &[])?;
        ensure!(said.iter().all(|with| *with), "without the library on '{much}': {said:?}");
    }
    let said = place.runs("sh", 2 * BELIEVED, "", &[(DEFER_VARIABLE, "64")])?;
    ensure!(said.iter().all(|with| *with), "without the library where it's said when sessions begin: {said:?}");
    // Who does more is noticed when he's looked at, and has the library from then on.
    for more in ["-calls 100", "-fork"] {
        let said = place.runs("sh", TIMES, more, &[])?;
        let noticed = said.iter().position(|with| *with).ok_or(format!("'{more}' was never looked at"))?;
        ensure!(said[noticed..].iter().all(|with| *with), "'{more}' goes without the library again: {said:?}");
        place.runs("sh", TIMES, "", &[])?;
    }
    place.end()
}

/// Runs short programs in the middle of its own work, and says of a file that it opens then whether it is LibFS's: its descriptor is one of a path alone.
const RUNNER: &str = "import os, subprocess, sys
def is_served(name):
    with open(name, 'w') as file:
        flags = [line for line in open(f'/proc/self/fdinfo/{file.fileno()}') if line.startswith('flags')]
        return int(flags[0].split()[1], 8) & 0o10000000 != 0
for number in range(100):
    open('own', 'a').close()
for number in range(40):
    assert is_served(f'before-{number}'), number
    subprocess.run([sys.argv[1]], check=True, stdout=subprocess.DEVNULL)
    os.waitpid(os.posix_spawn(sys.argv[1], [sys.argv[1]], os.environ), 0)
    assert is_served(f'after-{number}'), number
";

fn runner() -> Outcome<Verdict> {
    let place = Place::new("run")?;
    place.runs("sh", 2 * BELIEVED, "", &[])?;
    let mut command = Front::Run.command("python3");
    command.args(["-c", RUNNER]).arg(&place.program).env("OTHER", "kept").current_dir(place.site.point(0));
    let said = run(&mut command)?.success()?;
    let without = said.output.lines().filter(|line| *line == "without").count();
    ensure!(without >= 20, "only {without} of 40 programs went without the library");
    place.end()
}
