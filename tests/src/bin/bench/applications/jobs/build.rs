//! The build of a C project: uClibc-ng.
//!
//! It is a C library for small machines, which Debian ships as source (`uclibc-source`). Its smallest configuration is
//! a static library of some 550 files, so that a build takes half a minute.

use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::command::shell;
use ashlar_tests::{Outcome, ensure, tried};

use crate::applications::job::{Measured, Turn, seconds};
use crate::applications::program;
use crate::applications::size::Size;

/// The directory of the archive in Debian's package, and the beginning of its name.
const SOURCES: &str = "/usr/src";
const ARCHIVE: &str = "uClibc-ng-";
/// Uses the library's functions without its headers, which work only inside the library before it's installed. The
/// smallest configuration lacks a variable of its dynamic linker's.
const TEST: &str = "unsigned long _dl_pagesize = 4096;
int snprintf(char *, unsigned long, const char *, ...);
int puts(const char *);
int main(void) { char text[64]; return snprintf(text, sizeof text, \"%d of %s\", 42, \"uClibc\") != 12 || puts(text) < 0; }
";

fn archive() -> Outcome<PathBuf> {
    let entries = std::fs::read_dir(SOURCES).into_iter().flatten().flatten();
    let mut found = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(ARCHIVE));
    let missing =
        || format!("there is no {SOURCES}/{ARCHIVE}*, which 'scripts/setup.sh bench' installs (uclibc-source)");
    found.next().map(|entry| entry.path()).ok_or_else(missing)
}

/// Unpacks and configures it, and packs it again. The kernel's headers are links to the system's.
pub fn prepare(inputs: &Path, _: Size) -> Outcome {
    let script = format!(
        "tar xf '{}'
        mv {ARCHIVE}* project
        mkdir headers
        ln -s /usr/include/linux /usr/include/asm-generic headers
        ln -s /usr/include/$(gcc -print-multiarch)/asm headers/asm
        echo ARCH_USE_MMU=y >project/least.config
        KCONFIG_ALLCONFIG=least.config make -C project allnoconfig
        tar cf project.tar project
        rm -rf project",
        archive()?.display()
    );
    std::fs::write(inputs.join("test.c"), TEST).map_err(tried("writing"))?;
    shell(inputs, &script)?.success().map(|_| ())
}

/// Runs `make -j2` of the whole library, then again with nothing to do. The library is tested, not measured.
pub fn make(turn: &Turn) -> Outcome<Vec<Measured>> {
    program::time(turn.plainly("tar").arg("xf").arg(turn.inputs.join("project.tar")))?;
    let make = |targets: &[&str]| {
        let mut command = turn.command("make");
        command.args(["-s", "-j2", "-C", "project"]).arg(format!("KERNEL_HEADERS={}/headers", turn.inputs.display()));
        command.args(targets);
        turn.time(&mut command)
    };
    if turn.size == Size::Smallest {
        // Makes some 200 links and one object.
        let (took, _) = make(&["lib/crt1.o"])?;
        ensure!(turn.directory.join("project/lib/crt1.o").exists(), "lib/crt1.o was not made");
        return Ok(vec![seconds("make -j2", took, "1 object".into())]);
    }
    let (built, _) = make(&[])?;
    let (again, _) = make(&[])?;
    let members = turn.output_of(turn.plainly("ar").args(["t", "project/lib/libc.a"]))?.lines().count();
    ensure!(members > 500, "the library has only {members} members");
    let program = turn.inputs.join("test");
    let mut link = turn.plainly("gcc");
    link.args(["-static", "-nostdlib", "-ffreestanding", "-o"])
        .arg(&program)
        .args(["project/lib/crt1.o", "project/lib/crti.o"]);
    link.arg(turn.inputs.join("test.c")).args(["project/lib/libc.a", "-lgcc", "project/lib/crtn.o"]);
    turn.output_of(&mut link)?;
    let said = turn.output_of(&mut Command::new(&program))?;
    ensure!(said == "42 of uClibc\n", "a program with the library says '{said}'");
    let found = format!("{members} objects");
    Ok(vec![seconds("make -j2", built, found.clone()), seconds("make -j2, nothing to do", again, found)])
}
