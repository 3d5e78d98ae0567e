//! Two processes append to one file in turn: the lease moves with each append.

use std::fs::File;
use std::io::{self, Write};

use crate::error::CliError;
use crate::verbs::bench::case::Measurement;
use crate::verbs::bench::timing::{Summary, measure};
use crate::verbs::bench::turn_page::{Bell, PAGE, TurnPage};
use crate::verbs::bench::worker::files::system;
use crate::verbs::bench::worker::task::WorkerTask;

const BYTES: usize = 64;
/// Turns of each process. A lease that moves takes a message, and so a good part of a millisecond on a busy machine.
const TURNS: usize = 1000;

/// A way to hand over the turn.
trait TurnHandover {
    fn wait(&mut self, worker: u64) -> io::Result<()>;
    fn hand_over(&mut self, worker: u64) -> io::Result<()>;
}

impl TurnHandover for TurnPage {
    fn wait(&mut self, worker: u64) -> io::Result<()> {
        self.wait_for_turn(worker)
    }

    fn hand_over(&mut self, worker: u64) -> io::Result<()> {
        Self::hand_over(self, worker)
    }
}

impl TurnHandover for Bell {
    fn wait(&mut self, _: u64) -> io::Result<()> {
        self.sleep()
    }

    fn hand_over(&mut self, _: u64) -> io::Result<()> {
        self.ring()
    }
}

/// Both append once, one after the other. The floor is the turn alone, handed there and back.
pub fn turns(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let path = task.aside.join(PAGE);
    let mut page = TurnPage::open(&path).map_err(system("opening", &path))?;
    let mut bell = Bell::open(&path, task.worker).map_err(system("opening", &path))?;
    let path = task.directory.join("turns");
    let mut file = None;
    if !task.is_floor() {
        let opened = File::options().create(true).append(true).open(&path);
        file = Some(opened.map_err(system("opening", &path))?);
    }
    page.meet().map_err(system("meeting in", &task.aside))?;
    let spinning = in_turn(task, &mut page, file.as_mut()).map_err(system("appending to", &path))?;
    let waking = in_turn(task, &mut bell, file.as_mut()).map_err(system("appending to", &path))?;
    if task.worker == 1 {
        return Ok(Vec::new());
    }
    if let Some(file) = file {
        let (length, expected) = (file.metadata().map_err(system("looking at", &path))?.len(), 4 * TURNS * BYTES);
        if length != expected as u64 {
            let words = format!("{length} bytes are in {}, and {expected} were appended", path.display());
            return Err(CliError::system("appending in turn")(io::Error::other(words)));
        }
    }
    Ok(vec![
        Measurement::median("append 64 B in turn, there and back, spinning", spinning),
        Measurement::median("append 64 B in turn, there and back, woken", waking),
    ])
}

fn in_turn(task: &WorkerTask, turn: &mut dyn TurnHandover, mut file: Option<&mut File>) -> io::Result<Summary> {
    let data = [b'a' + task.worker as u8; BYTES];
    measure(TURNS, |_| {
        // The first worker's time is from its append to the moment at which it may append again.
        if task.worker == 1 {
            turn.wait(task.worker)?;
        }
        if let Some(file) = &mut file {
            file.write_all(&data)?;
        }
        turn.hand_over(task.worker)?;
        if task.worker == 0 { turn.wait(task.worker) } else { Ok(()) }
    })
}
