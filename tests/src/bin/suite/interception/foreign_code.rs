//! Code without libc.
//!
//! It is libraries that call the kernel themselves, code that a program makes, and programs that can't load the
//! library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_types::Errno;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/library_with_own_calls_uses_libc_descriptors", run: || when_mountable(libraries) },
    Test { name: "run/generated_code_fails_with_libc_descriptors", run: || when_mountable(generated) },
    Test { name: "run/program_of_another_libc_runs_silently", run: || when_mountable(programs) },
    Test { name: "run/program_in_chroot_runs_silently", run: || when_mountable(chroot) },
];

const LIBRARY: &str = include_str!("../../../../jobs/direct_calls.c");
const USER: &str = include_str!("../../../../jobs/direct_calls_user.c");
/// Prints its arguments, and then makes a shell print its own.
const SPEAKER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    puts(words[count - 1]);
    fflush(stdout);
    return system("echo child");
}
"#;
/// Runs a program in each possible way.
const RUNNERS: [&str; 4] = [
    "exec \"$0\" one",
    "\"$0\" one; true",
    "python3 -c 'import os, sys; os.posix_spawn(sys.argv[1], sys.argv[1:], {\"PATH\": \"/usr/bin:/bin\"}); os.wait()' \"$0\" one",
    "printf '#! %s\\n' \"$0\" > script && chmod +x script && ./script one",
];

/// Compiles a program or a library with a compiler and options; `None` if the compiler can't.
fn compile(site: &TestArena, compiler: &str, name: &str, text: &str, options: &[&str]) -> Outcome<Option<PathBuf>> {
    let program = site.outside().join(name);
    let source = program.with_extension("c");
    fs::write(&source, text).map_err(tried("writing a program"))?;
    let made = Command::new(compiler).args(["-O1", "-w", "-o"]).arg(&program).arg(&source).args(options).output();
    Ok(made.is_ok_and(|made| made.status.success()).then_some(program))
}

fn finish_test(site: TestArena) -> Outcome<Verdict> {
    site.check()?;
    site.umount(0)?;
    passed()
}

fn libraries() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let file = site.point(0).join("file");
    // With a build id the plan is kept; without one it's made each time. Without tables, only calls of a plain number
    // are found.
    for (name, options) in [("kept.so", "-Wl,--build-id"), ("anew.so", "-Wl,--build-id=none")] {
        let library = compile(&site, "gcc", name, LIBRARY, &["-shared", "-fPIC", options])?;
        let Some(library) = library else { return Ok(Verdict::Skipped("there is no gcc".into())) };
        let path = library.display().to_string();
        let linked = ["-Wl,--no-as-needed", &path, "-ldl"];
        for (name, options) in [("later", &["-ldl"][..]), ("linked", &linked)] {
            let user = compile(&site, "gcc", name, USER, options)?.ok_or("a program can't be linked")?;
            for front in [Front::Run, Front::RunAtOnce] {
                // The second run finds the plan of the first.
                for _ in 0..2 {
                    let done = run(front.command(&user).arg(&file).arg(&library))?.success()?;
                    ensure!(done.output.trim() == "0 0 3 7 7", "{name}, {front:?}: {}", done.describe());
                }
            }
        }
    }
    finish_test(site)
}

fn generated() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let user = compile(&site, "gcc", "user", USER, &["-ldl"])?;
    let Some(user) = user else { return Ok(Verdict::Skipped("there is no gcc".into())) };
    let file = site.point(0).join("file");
    let done = run(Front::Run.command(&user).arg(&file))?.success()?;
    let expected = format!("-{} -{1} -{1}", Errno::ENOTCONN.0, Errno::EBADF.0);
    ensure!(done.output.trim() == expected, "'{}', and not '{expected}'", done.output.trim());
    let found = fs::read(&file).map_err(tried("reading the file"))?;
    ensure!(found == b"libc", "the file holds {found:?}");
    finish_test(site)
}

fn programs() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut absent = Vec::new();
    for (name, compiler, options) in [("musl", "musl-gcc", &[][..]), ("32-bit", "gcc", &["-m32"])] {
        let Some(program) = compile(&site, compiler, name, SPEAKER, options)? else {
            absent.push(name);
            continue;
        };
        let mut direct = Front::Run.command(&program);
        run_silently(name, direct.arg("one"), &site.point(0))?;
        for script in RUNNERS {
            for shell in ["sh", "bash"] {
                let mut command = Front::Run.command(shell);
                run_silently(script, command.args(["-c", script]).arg(&program), &site.point(0))?;
            }
        }
    }
    finish_test(site)?;
    let without = if absent.is_empty() { String::new() } else { format!("without {absent:?}, not compiled here") };
    Ok(if absent.len() == 2 { Verdict::Skipped(without) } else { Verdict::Passed(without) })
}

/// Runs a program that prints two lines and nothing else.
fn run_silently(what: &str, command: &mut Command, directory: &Path) -> Outcome<()> {
    let done = run(command.current_dir(directory))?.success()?;
    ensure!(done.output == "one\nchild\n" && done.errors.is_empty(), "{what}: {}", done.describe());
    Ok(())
}

fn chroot() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let script = r#"set -e
        mkdir -p root/bin; cp /bin/sh root/bin/sh; cp -L /bin/true root/bin
        for library in $(ldd /bin/sh /bin/true | grep -o '/[^ :]*' | sort -u); do
            case $library in *.so*) mkdir -p "root${library%/*}"; cp -L "$library" "root$library";; esac
        done
        chroot root /bin/sh -c '/bin/true && (/bin/true; echo ok)'
        unshare --mount sh -c 'mount --bind root root && chroot root /bin/true'"#;
    for shell in ["sh", "bash"] {
        let done = run(Front::Run.command(shell).args(["-c", script]).current_dir(site.outside()))?.success()?;
        ensure!(done.output == "ok\n" && done.errors.is_empty(), "{shell}: {}", done.describe());
    }
    finish_test(site)
}
