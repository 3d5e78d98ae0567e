//! Programs that end so soon that they run without the library.
//!
//! The profile of their earlier runs says which programs these are.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_wire::DEFER_VARIABLE;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/short_programs_run_without_the_library", run: || when_mountable(short) },
    Test { name: "run/runner_of_short_programs_is_served_as_before", run: || when_mountable(runner) },
    Test { name: "run/programs_leave_only_their_files_in_an_arena", run: || when_mountable(traces) },
];

/// Prints whether it has the library. If its first argument says so, it makes that many calls on a file.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
int main(int count, char **words) {
    struct stat found;
    const char *preload = getenv("LD_PRELOAD"), *other = getenv("OTHER");
    if (!other || strcmp(other, "kept") != 0) return 1;
    for (int i = 0; count > 2 && !strcmp(words[1], "-calls") && i < atoi(words[2]); i++)
        if (stat("file", &found) != 0) return 1;
    puts(preload && strstr(preload, "libashlar_preload") ? "with" : "without");
    return 0;
}
"#;
/// Runs a program in memory that it lends, again and again, while a timer interrupts it. At the end its signals come as
/// before.
const LENDER: &str = r#"
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
extern char **environ;
static volatile sig_atomic_t ticks;
static void tick(int number) { (void)number; ticks++; }
int main(int count, char **words) {
    struct sigaction action = { .sa_handler = tick };
    struct itimerval every = { { 0, 300 }, { 0, 300 } };
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
    for (int i = 0; count == 2 && i < 400; i++) {
        int status = 1;
        pid_t child = vfork();
        if (child == 0) {
            execve(words[1], (char *[]){ words[1], NULL }, environ);
            _exit(9);
        }
        while (waitpid(child, &status, 0) != child) { }
        if (status != 0) return 2;
    }
    sigset_t blocked;
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    int before = ticks;
    for (time_t end = time(NULL) + 2; ticks < before + 10 && time(NULL) < end; ) { }
    return sigismember(&blocked, SIGALRM) ? 3 : ticks < before + 10 ? 4 : 0;
}
"#;
/// The file of program profiles.
pub const PROFILE: &str = "/var/cache/ashlar/plans/program_profile";
/// How often a program must have ended before its profile counts.
const BELIEVED: usize = 8;
/// How often it runs then. One run in sixteen is observed.
const TIMES: usize = 160;

struct ProgramSite {
    site: TestArena,
    program: PathBuf,
}

fn compile(site: &TestArena, name: &str, text: &str) -> Outcome<PathBuf> {
    let program = site.outside().join(name);
    let source = program.with_extension("c");
    fs::write(&source, text).map_err(tried("writing a program"))?;
    run(Command::new("gcc").arg("-o").arg(&program).arg(&source))?.success()?;
    Ok(program)
}

impl ProgramSite {
    /// Forgets the profiles that this machine had before.
    fn new() -> Outcome<Self> {
        let site = TestArena::mounted(Medium::Memory, "64M")?;
        let _ = fs::remove_file(PROFILE);
        let program = compile(&site, "says-what-it-has", PROGRAM)?;
        fs::write(site.point(0).join("file"), "x").map_err(tried("writing a file"))?;
        fs::write(site.point(0).join("large"), vec![0; 1 << 20]).map_err(tried("writing a file"))?;
        fs::create_dir(site.point(0).join("directory")).map_err(tried("making a directory"))?;
        Ok(Self { site, program })
    }

    /// The program's answer in each of so many runs, with these arguments, out of a shell.
    fn run_times(&self, shell: &str, times: usize, arguments: &str, settings: &[(&str, &str)]) -> Outcome<Vec<bool>> {
        let script = format!("for i in $(seq {times}); do {} {arguments} || exit 1; done", self.program.display());
        let mut command = Front::Run.command(shell);
        command.args(["-c", &script]).env("OTHER", "kept").envs(settings.iter().copied());
        let done = run(command.current_dir(self.site.point(0)))?.success()?;
        let said: Vec<_> = done.output.lines().map(|line| line == "with").collect();
        ensure!(said.len() == times, "{times} runs expected: {}", done.describe());
        Ok(said)
    }

    fn finish(self) -> Outcome<Verdict> {
        self.site.check()?;
        self.site.umount(0)?;
        passed()
    }
}

fn short() -> Outcome<Verdict> {
    let place = ProgramSite::new()?;
    // A shell that lends its memory to programs, and one that copies it.
    for (shell, first) in [("sh", BELIEVED), ("bash", 0)] {
        let said = place.run_times(shell, TIMES, "", &[])?;
        ensure!(said[..first].iter().all(|with| *with), "without the library in one of the first runs: {said:?}");
        let with = said[first..].iter().filter(|with| **with).count();
        ensure!((1..=TIMES / 4).contains(&with), "of {TIMES} short programs of {shell}, {with} have the library");
    }
    // A run with large inputs has the library, whatever earlier runs did.
    for much in ["large", "-L directory", "-I file directory", "<large"] {
        let said = place.run_times("sh", 2 * BELIEVED, much, &[])?;
        ensure!(said.iter().all(|with| *with), "without the library on '{much}': {said:?}");
    }
    // A directory that a program searches for includes is not one that it walks through.
    let said = place.run_times("sh", 2 * BELIEVED, "-I directory -I directory file", &[])?;
    let with = said.iter().filter(|with| **with).count();
    ensure!(with <= BELIEVED, "of {} runs on little, {with} have the library", said.len());
    for setting in [(DEFER_VARIABLE, "64"), ("LD_PRELOAD", "libm.so.6")] {
        let said = place.run_times("sh", 2 * BELIEVED, "", &[setting])?;
        ensure!(said.iter().all(|with| *with), "without the library where {setting:?} is set: {said:?}");
    }
    // One run in sixteen, chosen at random, is observed. If the program does more in it, it has the library from then
    // on.
    let said = place.run_times("sh", TIMES, "-calls 100", &[])?;
    let noticed = said.iter().position(|with| *with).ok_or("a program with 100 calls was never observed")?;
    let again = said[noticed..].iter().take(4 * BELIEVED).position(|with| !*with);
    ensure!(again.is_none(), "what has made 100 calls goes without the library again: {said:?}");
    // A program that may run others has the library, so that those have it.
    let runs_others = compile(
        &place.site,
        "runs-others",
        &PROGRAM.replace("puts(preload", "if (count > 99) system(words[1]); puts(preload"),
    )?;
    let others = ProgramSite { program: runs_others, ..place };
    let said = others.run_times("sh", 3 * BELIEVED, "", &[])?;
    ensure!(said.iter().all(|with| *with), "without the library though it may run others: {said:?}");
    let place = others;
    // A program that may write nothing gets no signal from the record at its end.
    let limited = place.program.with_extension("limited");
    fs::copy(&place.program, &limited).map_err(tried("copying a program"))?;
    let script = format!("ulimit -f 0; exec {}", limited.display());
    run(Front::Run.command("sh").args(["-c", &script]).env("OTHER", "kept"))?.success()?;
    place.finish()
}

/// Runs short programs in the middle of its own work. Prints whether LibFS serves a file that it opens then: its
/// descriptor is an `O_PATH` one.
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
    let place = ProgramSite::new()?;
    place.run_times("sh", 2 * BELIEVED, "", &[])?;
    let mut command = Front::Run.command("python3");
    command.args(["-c", RUNNER]).arg(&place.program).env("OTHER", "kept").current_dir(place.site.point(0));
    let said = run(&mut command)?.success()?;
    let without = said.output.lines().filter(|line| *line == "without").count();
    ensure!(without >= 20, "only {without} of 40 programs went without the library");
    let lender = compile(&place.site, "lends", LENDER)?;
    let mut command = Front::Run.command(lender.display().to_string());
    let said = run(command.arg(&place.program).env("OTHER", "kept").current_dir(place.site.point(0)))?.success()?;
    let without = said.output.lines().filter(|line| *line == "without").count();
    ensure!(without >= 200, "only {without} of 400 programs went without the library");
    place.finish()
}

/// Bytes of an arena's own files.
fn arena_bytes(site: &TestArena, names: &[&str]) -> Outcome<u64> {
    let of = |name: &&str| fs::metadata(site.arena().join(name)).map(|found| found.len());
    names.iter().map(of).sum::<Result<u64, _>>().map_err(tried("looking at an arena's files"))
}

/// On a machine that runs programs for years, no log has them.
fn traces() -> Outcome<Verdict> {
    let place = ProgramSite::new()?;
    let logs = ["daemon.log", "mount.log"];
    let all = |times: usize| -> Outcome<u64> {
        place.run_times("sh", times, "-calls 1", &[(DEFER_VARIABLE, "0")])?;
        arena_bytes(&place.site, &logs)
    };
    let before = all(1)?;
    let opened = place.site.counter("sessions_opened")?;
    ensure!(all(TIMES)? == before, "the logs have grown with {TIMES} programs");
    let opened = place.site.counter("sessions_opened")? - opened;
    ensure!(opened >= TIMES as u64, "only {opened} of {TIMES} programs had sessions");
    let sessions = fs::read_dir(place.site.arena().join("sessions")).map_err(tried("listing sessions"))?.count();
    ensure!(sessions < TIMES, "there are {sessions} files of sessions");
    place.finish()
}
