//! Programs under adverse conditions: forks, full tables, signals, limits.
//!
//! They fork amid their threads, take all descriptors, are interrupted all the time, or meet their limits. Some are
//! hostile. `adverse.c`, `freed_descriptors.c` and `memory_limits.c` have a story for each condition,
//! `wide_registers.c` has one, and they print the results. These must be the same in memory without Ashlar, on a mount,
//! and with LibFS in the process, from its first call on and after some.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/close_range_closes_for_the_named_processes", run: || compare_story(ADVERSE, "ranges") },
    Test { name: "run/thread_may_unshare_files", run: || compare_story(ADVERSE, "separate") },
    Test { name: "run/mapping_grows_with_its_file", run: || compare_story(ADVERSE, "growing") },
    Test { name: "run/forks_amid_writing_threads_lose_nothing", run: || compare_story(ADVERSE, "forks") },
    Test { name: "run/program_may_take_any_descriptor_number", run: || compare_story(ADVERSE, "numbers") },
    Test { name: "run/dup2_replaces_file_that_threads_write", run: || compare_story(ADVERSE, "races") },
    Test { name: "run/file_replaced_all_the_time_can_be_opened", run: || compare_story(ADVERSE, "replaced") },
    Test { name: "run/constant_signals_change_no_answer", run: || compare_story(ADVERSE, "signals") },
    Test { name: "run/two_processes_append_without_loss", run: || compare_story(ADVERSE, "appends") },
    Test { name: "run/open_files_and_working_directory_may_be_removed", run: || compare_story(ADVERSE, "removed") },
    Test { name: "run/bad_vectors_and_pointers_answer_as_the_kernel", run: || compare_story(ADVERSE, "vectors") },
    Test { name: "run/partly_mapped_buffers_answer_as_the_kernel", run: || compare_story(PARTLY_MAPPED, "") },
    Test { name: "run/limits_hold_as_in_the_kernel", run: || compare_story(ADVERSE, "limits") },
    Test { name: "run/executed_program_finds_open_files", run: || compare_story(ADVERSE, "passes") },
    Test { name: "run/registers_survive_direct_kernel_calls", run: || compare_story(WIDE_REGISTERS, "") },
    Test { name: "run/descriptor_gets_lowest_free_number", run: || compare_story(FREED_DESCRIPTORS, "next") },
    Test { name: "run/closed_descriptor_leads_nowhere", run: || compare_story(FREED_DESCRIPTORS, "nowhere") },
    Test { name: "run/closed_files_are_gone_for_other_processes", run: || compare_story(FREED_DESCRIPTORS, "others") },
    Test { name: "run/closed_descriptor_makes_room_for_one", run: || compare_story(FREED_DESCRIPTORS, "limits") },
    Test { name: "run/threads_open_and_close_at_once", run: || compare_story(FREED_DESCRIPTORS, "threads") },
    Test {
        name: "run/descriptor_that_another_thread_closes_gives_ebadf",
        run: || compare_story(FREED_DESCRIPTORS, "guessed"),
    },
    Test {
        name: "run/file_in_use_as_the_user_changes_gives_no_errors",
        run: || compare_story(FREED_DESCRIPTORS, "users"),
    },
    Test {
        name: "run/signal_handler_leaves_interrupted_call_alone",
        run: || compare_story(FREED_DESCRIPTORS, "interrupted"),
    },
    Test { name: "run/ended_thread_leaves_nothing", run: || compare_story(FREED_DESCRIPTORS, "ends") },
    Test { name: "run/programs_with_little_address_space_run", run: || compare_story(MEMORY_LIMITS, "children") },
    Test { name: "run/raised_memory_limit_takes_effect", run: || compare_story(MEMORY_LIMITS, "itself") },
    Test { name: "run/files_work_without_free_address_space", run: || compare_story(MEMORY_LIMITS, "address-space") },
    Test { name: "run/files_work_without_room_for_data", run: || compare_story(MEMORY_LIMITS, "data") },
    Test { name: "run/program_limited_by_another_continues", run: || compare_story(MEMORY_LIMITS, "outside") },
    Test { name: "run/threads_use_files_as_room_runs_out", run: || compare_story(MEMORY_LIMITS, "threads") },
    Test { name: "run/memory_checkers_keep_working", run: checked },
];

/// A program with stories.
#[derive(Clone, Copy)]
struct StoryProgram {
    name: &'static str,
    text: &'static str,
}

const ADVERSE: StoryProgram = StoryProgram { name: "adverse.c", text: include_str!("../../../../jobs/adverse.c") };
const FREED_DESCRIPTORS: StoryProgram =
    StoryProgram { name: "freed_descriptors.c", text: include_str!("../../../../jobs/freed_descriptors.c") };
const MEMORY_LIMITS: StoryProgram =
    StoryProgram { name: "memory_limits.c", text: include_str!("../../../../jobs/memory_limits.c") };
const WIDE_REGISTERS: StoryProgram =
    StoryProgram { name: "wide_registers.c", text: include_str!("../../../../jobs/wide_registers.c") };
const PARTLY_MAPPED: StoryProgram =
    StoryProgram { name: "partly_mapped.c", text: include_str!("../../../../jobs/partly_mapped.c") };
const SANITIZED: StoryProgram =
    StoryProgram { name: "sanitized.c", text: include_str!("../../../../jobs/sanitized.c") };
/// The header that all include.
const STORY_HEADER: StoryProgram = StoryProgram { name: "story.h", text: include_str!("../../../../jobs/story.h") };

/// Descriptors that a story may have: as many as most programs may, and few enough to take them all.
const DESCRIPTORS: u32 = 1024;
/// The limit for a story in seconds. A story that hangs says no more after that.
const SECONDS: u32 = 60;

fn compare_story(source: StoryProgram, story: &str) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    // A data segment has 256 MiB, if there is room.
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    let Some(program) = compile(&site, source, &[])? else { return Ok(Verdict::Skipped("there is no gcc".into())) };
    let answers = compare(&site.point(0), &program, story)?;
    site.check()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{answers} answers")))
}

/// Programs that a compiler has instrumented to check each memory access. They must find no fault of the library, and
/// must still find the program's own.
fn checked() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut absent = Vec::new();
    for kind in ["address", "thread", "leak", "undefined"] {
        let option = format!("-fsanitize={kind}");
        let Some(program) = compile(&site, SANITIZED, &["-g", &option])? else {
            return Ok(Verdict::Skipped("there is no gcc".into()));
        };
        let elsewhere = tempfile::tempdir().map_err(tried("making a directory"))?;
        if run_story(Front::Mount, &program, "", elsewhere.path()).is_err() {
            // Some compilers' checkers don't know the addresses that some kernels give.
            absent.push(kind);
            continue;
        }
        let place = site.point(0).join(kind);
        std::fs::create_dir(&place).map_err(tried("making a directory"))?;
        compare(&place, &program, "").map_err(|error| format!("{option}: {error}"))?;
        if kind == "address" {
            let mut command = Front::Run.command(program.display().to_string());
            let done = run(command.arg("beyond").current_dir(&place))?;
            ensure!(!done.status.success() && done.describe().contains("heap-buffer-overflow"), "{}", done.describe());
        }
    }
    // A checker that runs a program's code in its own way runs that program without the library.
    let Some(program) = compile(&site, SANITIZED, &["-g"])? else {
        return Ok(Verdict::Skipped("there is no gcc".into()));
    };
    let under = site.outside().join("under-valgrind");
    let script = format!("#!/bin/sh\nexec valgrind -q --error-exitcode=9 {} \"$@\"\n", program.display());
    std::fs::write(&under, script).map_err(tried("writing a script"))?;
    std::fs::set_permissions(&under, Permissions::from_mode(0o755)).map_err(tried("chmod"))?;
    compare(&site.point(0), &under, "").map_err(|error| format!("Valgrind: {error}"))?;
    site.check()?;
    site.umount(0)?;
    ensure!(absent.len() < 3, "none of this compiler's sanitizers run on this machine but one: not {absent:?}");
    let without =
        if absent.is_empty() { String::new() } else { format!("without {absent:?}, not run here by anything") };
    Ok(Verdict::Passed(without))
}

/// The program, compiled with these options; `None` if there is no compiler.
fn compile(site: &TestArena, story_program: StoryProgram, options: &[&str]) -> Outcome<Option<PathBuf>> {
    let (source, program) = (site.outside().join(story_program.name), site.outside().join("story"));
    for StoryProgram { name, text } in [story_program, STORY_HEADER] {
        std::fs::write(site.outside().join(name), text).map_err(tried("writing a program"))?;
    }
    let mut command = Command::new("gcc");
    // Some calls are tested with pointers that lead nowhere.
    command.args(["-O1", "-w", "-pthread"]).args(options).arg("-o").arg(&program).arg(&source);
    match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("gcc: {error}")),
        Ok(done) => ensure!(done.status.success(), "gcc: {}", String::from_utf8_lossy(&done.stderr)),
    }
    Ok(Some(program))
}

/// Runs a story in memory, and below a directory on a mount, without LibFS in the process and with it. The answers must
/// be the same; returns how many there are.
fn compare(directory: &Path, program: &Path, story: &str) -> Outcome<usize> {
    let memory = tempfile::Builder::new().prefix("ashlar-unlucky-").tempdir_in("/dev/shm");
    let memory = memory.map_err(tried("making a directory in memory"))?;
    let expected = run_story(Front::Mount, program, story, memory.path())?;
    for front in [Front::Mount, Front::Run, Front::RunAtOnce] {
        let place = directory.join(format!("{front:?}"));
        std::fs::create_dir(&place).map_err(tried("making a directory"))?;
        let found = run_story(front, program, story, &place).map_err(|error| format!("{front:?}: {error}"))?;
        for (expected, found) in expected.lines().zip(found.lines()) {
            ensure!(expected == found, "{front:?}: '{found}', in memory '{expected}'");
        }
        ensure!(expected.len() == found.len(), "{front:?}: it says no more than {found}");
    }
    Ok(expected.lines().count())
}

/// A story's output in a directory.
fn run_story(front: Front, program: &Path, story: &str, directory: &Path) -> Outcome<String> {
    let mut command = front.command("sh");
    let script = format!("ulimit -n {DESCRIPTORS}; exec timeout -s KILL {SECONDS} \"$0\" {story}");
    command.args(["-c", &script]).arg(program).current_dir(directory).stdin(Stdio::null());
    Ok(run(&mut command)?.success()?.output)
}
