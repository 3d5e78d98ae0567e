//! The small command beside `ashlar-main`: both run programs alike.
//!
//! The small command runs programs without libc if everything is in order; `ashlar-main` handles all cases.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::command::{Done, program, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_wire::DEFER_VARIABLE;

/// The tests of this group.
pub const TESTS: &[Test] =
    &[Test { name: "run/small_command_runs_programs_as_ashlar_main", run: || when_mountable(alike) }];

/// The library that programs are run with.
const LIBRARY: &str = "libashlar_preload.so";
const MAIN: &str = "ashlar-main";

/// Runs a program with an environment that no shell passes on.
const STRANGE: &str = r#"
#include <unistd.h>
int main(int count, char **words) {
    char *environment[] = { "TWICE=first", "PATH=/nowhere", "no value", "", "=", "=x", "=C:=y", "EMPTY=", "TWICE=second", "LD_PRELOAD=",
        "A==", "ASHLAR_RUN=a", "ASHLAR_RUN=b", "TWICE=third", "PATH=/usr/bin:/bin", NULL };
    (void)count;
    execve(words[1], words + 1, environment);
    return 99;
}
"#;

/// The scripts' directory: programs of all kinds, in places that are on no list yet.
const PLACES: &str = r#"
printf '#!/bin/sh\necho here "$@"; exit 5\n' > here; printf 'echo without a line "$@"\n' > plain; printf '#!/none/at/all\n' > lost
printf '\177ELF and no more' > broken; chmod +x here plain lost broken; echo > closed
mkdir -p other denied directory/cat nobody many/"$(printf 'x%.0s' $(seq 200))"; echo > denied/cat; chmod 777 nobody; cp here other/plain
"#;

/// Scripts that the small command serves by itself; their arguments are the command and `run`.
const SERVED: &[&str] = &[
    r#""$@" cat /proc/self/environ /proc/self/cmdline '' ' a' "$(printf '\377')""#,
    r#""$@" -- cat /proc/self/cmdline -- --"#,
    r#""$@" sh -c 'exit 3'"#,
    r#""$@" sh -c 'kill -KILL $$'; echo $?"#,
    r#"echo in | "$@" sh -c 'cat; echo out; echo errors >&2'"#,
    r#"PATH=:/usr/bin "$@" here a; echo $?"#,
    r#"PATH=/usr/bin: "$@" here; PATH=/usr/bin::/bin "$@" here; PATH= "$@" here"#,
    r#"env -u PATH "$@" cat /proc/self/environ"#,
    r#""$@" ./here; "$@" "$PWD/here" ''; "$@" directory/../here"#,
    r#"PATH=$PWD/denied:$PWD/closed:$PWD/directory:/none:/usr/bin:/bin "$@" cat /proc/self/environ"#,
    r#"LD_PRELOAD=libc.so.6 "$@" cat /proc/self/environ"#,
    r#"LD_PRELOAD= "$@" cat /proc/self/environ"#,
    r#"ASHLAR_RUN=x ASHLAR_PLANS=y "$@" cat /proc/self/environ"#,
    r#""$@" "$@" cat /proc/self/environ"#,
    r#"./strange "$@" cat /proc/self/environ"#,
    r#""$@" sh -c 'echo $# ${20000}' sh $(seq 20000)"#,
    r#"env $(seq -f 'V%g=x' 3000) V7=y "$@" cat /proc/self/environ"#,
    r#"trap '' PIPE INT; "$@" grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status"#,
    // The record of a process that is gone, beside its mount.
    r#"unshare -m sh -c 'cp -r /run/ashlar old && mount --bind old /run/ashlar && for file in old/*; do sed -i "s/\"pid\":[0-9]*/\"pid\":4194304/" $file; break; done; exec "$@" cat /proc/self/environ' sh "$@""#,
];

/// Scripts that it leaves to `ashlar-main`, or whose programs can't be run.
const LEFT: &[&str] = &[
    r#""$@" nothing-of-this-name; echo $?; "$@" ./nothing; echo $?"#,
    r#""$@" ./closed; echo $?; "$@" ./closed/x; echo $?; PATH=$PWD/denied "$@" cat; echo $?"#,
    r#""$@" ./directory; echo $?; PATH=$PWD/directory "$@" cat; echo $?"#,
    r#""$@" ./plain a; PATH=$PWD "$@" plain; PATH=$PWD:$PWD/other "$@" plain; "$@" ./lost; echo $?; "$@" ./broken; echo $?"#,
    r#""$@" ''; echo $?; "$@" -- -x; echo $?; "$@" "$(printf 'x%.0s' $(seq 300))"; echo $?"#,
    r#"PATH=$(printf "$PWD/many/%d:" $(seq 500)):/usr/bin:/bin; export PATH; "$@" cat /proc/self/environ"#,
    r#"env $(seq -f 'V%g=x' 30000) "$@" cat /proc/self/environ | md5sum"#,
    r#""$@" readlink /proc/self/fd/0 <&-; "$@" readlink /proc/self/fd/2 2>&-; "$@" true >&-; echo $?"#,
    r#"setpriv --reuid=65534 --regid=65534 --clear-groups env HOME="$PWD/nobody" "$@" cat /proc/self/environ; ls -d nobody/.cache/ashlar"#,
    r#"setpriv --reuid=65534 --regid=65534 --clear-groups env -u HOME "$@" cat /proc/self/environ"#,
    r#"unshare -m sh -c 'mount -t tmpfs none /run && exec "$@" cat /proc/self/environ' sh "$@""#,
    r#"unshare -m sh -c 'mount -t tmpfs none /proc && "$@" true; echo $?' sh "$@""#,
    // A record that is being written, one of a process that is gone with its mount, and one that is no record.
    r#"unshare -m sh -c 'cp -r /run/ashlar records && mount --bind records /run/ashlar && echo > records/1.json && exec "$@" cat /proc/self/environ' sh "$@""#,
    r#"unshare -m sh -c 'cp -r /run/ashlar more && mount --bind more /run/ashlar && echo "$0" > more/1.json && "$@" cat /proc/self/environ; ls more' \
        '{"directory":"/none","arena":"/none","pid":4194304,"device":9}' "$@" | grep -a -e ASHLAR_RUN -e '^1.json'"#,
    r#"unshare -m sh -c 'mkdir large && mount --bind large /run/ashlar && printf "%9000s" "" > large/1.json && exec "$@" cat /proc/self/environ' sh "$@""#,
];

/// A place for scripts, and the files that they find there.
struct ScriptDirectory {
    directory: PathBuf,
    strange: PathBuf,
    /// The records of this test's mounts alone: others may come and go meanwhile.
    records: PathBuf,
}

impl ScriptDirectory {
    fn new(site: &TestArena) -> Outcome<Self> {
        let within = |name: &str| site.outside().join(name);
        let (source, strange, records) = (within("strange.c"), within("strange"), within("records"));
        fs::write(&source, STRANGE).map_err(tried("writing a program"))?;
        run(Command::new("gcc").arg("-o").arg(&strange).arg(&source))?.success()?;
        fs::create_dir(&records).map_err(tried("making a directory"))?;
        let arena = site.arena().display().to_string();
        for file in fs::read_dir("/run/ashlar").map_err(tried("listing the records"))?.flatten() {
            // Another test's record may be gone by now.
            let record = fs::read_to_string(file.path()).unwrap_or_default();
            if record.contains(&arena) {
                fs::write(records.join(file.file_name()), record).map_err(tried("copying a record"))?;
            }
        }
        Ok(Self { directory: within("place"), strange, records })
    }

    /// Runs a script with a command. The directory is fresh, and has the same name for each.
    fn run(&self, command: &Path, script: &str) -> Outcome<Done> {
        let directory = &self.directory;
        if directory.exists() {
            fs::remove_dir_all(directory).map_err(tried("clearing the directory"))?;
        }
        fs::create_dir(directory).map_err(tried("making a directory"))?;
        fs::copy(&self.strange, directory.join("strange")).map_err(tried("copying a program"))?;
        let records = self.records.display();
        let script = format!("mount --bind {records} /run/ashlar; cd {}; {PLACES}\n{script}", directory.display());
        let mut shell = Command::new("unshare");
        shell.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", directory);
        // Program profiles decide nothing then; without it, a program that is served would run short ones without the
        // library.
        shell.env(DEFER_VARIABLE, "64");
        run(shell.args(["--mount", "sh", "-c", &script, "sh"]).arg(command).arg("run"))
    }
}

fn alike() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.mount(1)?;
    let place = ScriptDirectory::new(&site)?;
    // Without ashlar-main, the small command can leave nothing to it.
    let alone = site.outside().join("alone");
    fs::create_dir(&alone).map_err(tried("making a directory"))?;
    for file in ["ashlar", LIBRARY] {
        fs::copy(program().with_file_name(file), alone.join(file)).map_err(tried("copying the command"))?;
    }
    let beside = program().parent().map(|place| place.display().to_string()).unwrap_or_default();
    for (number, script) in SERVED.iter().chain(LEFT).enumerate() {
        let expected = place.run(&program().with_file_name(MAIN), script)?;
        let parts = |done: Done| (done.status, done.output, done.errors);
        let expected = parts(expected);
        let found = parts(place.run(&program(), script)?);
        ensure!(found == expected, "{script}: {found:?}, and ashlar-main {expected:?}");
        if number < SERVED.len() {
            let from = alone.display().to_string();
            let (status, output, errors) = parts(place.run(&alone.join("ashlar"), script)?);
            let found = (status, output.replace(&from, &beside), errors.replace(&from, &beside));
            ensure!(found == expected, "{script}: {found:?} by the command alone, and ashlar-main {expected:?}");
        }
    }
    let mounts = place.run(&program(), r#""$@" printenv ASHLAR_RUN"#)?.success()?.output;
    for number in 0..2 {
        let point = site.point(number).display().to_string();
        ensure!(mounts.contains(&point), "a program gets {mounts}, not {point}");
    }
    site.umount(1)?;
    site.umount(0)?;
    passed()
}
