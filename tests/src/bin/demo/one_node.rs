//! One node: programs continue over kills of SharedFS, and lose nothing when everything is killed.

use std::time::{Duration, Instant};

use ashlar_tests::Outcome;
use ashlar_tests::mount::{Medium, TestArena};

use crate::jobs::MOUNT_JOBS;
use crate::running::{Running, await_progress};
use crate::story::Story;

/// How long programs work before the first kill, between kills, and after the last one.
const WORK: Duration = Duration::from_secs(5);
/// Kills of SharedFS under running programs.
const KILLS: usize = 3;

/// Tells the story.
pub fn tell() -> Outcome {
    let story = Story::begin("\nOne node: kills in the middle of the work");
    let site = TestArena::new(Medium::Disk, "512M")?;
    story.say("ashlar mount: makes an arena, starts the daemon, mounts");
    story.add(&site.mount(0)?.output);
    let start = |job| Running::start(job, site.point(0).join(job.name), site.outside());
    let mut running = MOUNT_JOBS.iter().map(start).collect::<Outcome<Vec<_>>>()?;
    story.say("these work on it, and write down outside whatever was acknowledged to them:");
    MOUNT_JOBS.iter().for_each(|job| story.add(&format!("{:<8} {}", job.name, job.description)));
    await_progress(&mut running, 1)?;
    kill_daemon_repeatedly(&story, &site, &mut running)?;
    std::thread::sleep(WORK);
    kill_everything(&story, &site, &mut running)?;
    let start = Instant::now();
    site.mount(0)?;
    story.say(&format!("mounted again, logs recovered: {} ms", start.elapsed().as_millis()));
    verify(&story, &site, &running)?;
    let start = Instant::now();
    site.umount(0)?;
    site.check()?;
    story.say(&format!(
        "unmounted ({} ms), nothing left running, and the check at rest is clean",
        start.elapsed().as_millis()
    ));
    Ok(())
}

/// Kills SharedFS while all programs run: each of them pauses, none of them fails.
fn kill_daemon_repeatedly(story: &Story, site: &TestArena, running: &mut [Running]) -> Outcome {
    for _ in 0..KILLS {
        std::thread::sleep(WORK);
        let pid = site.daemon()?;
        let start = Instant::now();
        site.kill_daemon()?;
        let back = start.elapsed();
        await_progress(running, 2)?;
        story.say(&format!(
            "kill -9 of the daemon (process {pid}) in the middle of their work: another one serves after {} ms; all {} programs continued",
            back.as_millis(),
            running.len()
        ));
    }
    Ok(())
}

fn kill_everything(story: &Story, site: &TestArena, running: &mut [Running]) -> Outcome {
    // The file system's processes first, so that they die in the middle of the programs' calls.
    let killed = site.kill_everything();
    running.iter_mut().try_for_each(Running::kill)?;
    killed?;
    story.say("kill -9 of everything at once: programs, mount, daemon, supervisor");
    Ok(())
}

fn verify(story: &Story, site: &TestArena, running: &[Running]) -> Outcome {
    for it in running {
        let start = Instant::now();
        let verdict = it.verify(&site.point(0))?;
        story.say(&format!("{:<8} {verdict} ({} ms)", it.job.name, start.elapsed().as_millis()));
    }
    let start = Instant::now();
    let counts = site.check()?;
    let (inodes, blocks) = (&counts["inodes"], &counts["blocks"]);
    story.say(&format!("fsck     clean: {inodes} inodes, {blocks} blocks ({} ms)", start.elapsed().as_millis()));
    Ok(())
}
