//! Questions to a SharedFS that is awake, through shared memory: the program's thread waits for the answer without sleeping.

use std::time::{Duration, Instant};

use ashlar_pmem::Mapping;
use ashlar_types::Errno;
use ashlar_wire::{Connection, ControlPage, Progress, Question, Reply, Request, WireError};

/// How long SharedFS may take to look: it answers somebody else meanwhile, as a rule.
const HEARING_MAX: Duration = Duration::from_micros(30);
/// How long the answer is watched for before the thread sleeps in between.
const WATCH: Duration = Duration::from_micros(100);
/// How long it sleeps first, and at most; in between twice as long each time.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Questions that go by messages after one that nobody has heard: whoever listens is busy.
const UNHEARD: u32 = 4;

/// What the thread needs whose turn it is.
#[derive(Debug, Default)]
pub(crate) struct Asker {
    buffer: Vec<u8>,
    /// So many questions go by messages yet.
    skips: u32,
}

/// Whether a request may be asked there: those for which programs wait most, and that SharedFS answers at once.
pub(crate) fn is_short(request: &Request) -> bool {
    use Request::{Acquire, Lookup, Map, ReadDirectory, Unmap};
    matches!(request, Acquire(_) | Lookup { .. } | ReadDirectory { .. } | Map { .. } | Unmap { .. })
}

impl Asker {
    /// Asks, and waits for the answer; `None` where it's to be asked by a message. Silence is borne as `bear` says.
    ///
    /// # Errors
    /// [`WireError::Closed`] where the connection of the same SharedFS is, and those of `bear`.
    pub(crate) fn ask(
        &mut self,
        control: &ControlPage<Mapping>,
        request: &Request,
        connection: &mut Connection,
        silence: Duration,
        bear: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<Option<Reply>, WireError> {
        let request_slot = control.request_slot();
        if !request_slot.is_listened_to() {
            return Ok(None);
        }
        if self.skips > 0 {
            self.skips -= 1;
            return Ok(None);
        }
        let Some(question) = request_slot.ask(request, &mut self.buffer) else { return Ok(None) };
        let waited = self.wait(control, question, connection, silence, bear);
        let told = match waited {
            Ok(Progress::Answered) => request_slot.read(&mut self.buffer).map(Some),
            // Before anybody else asks: one answer is kept for the session.
            Ok(Progress::Kept) => match connection.call_watched(&Request::Kept(question), &[], bear) {
                Ok((Reply::Error(Errno::EPROTO), _)) => Ok(None),
                fetched => fetched.map(|(reply, _)| Some(reply)),
            },
            // It was taken back.
            Ok(Progress::Asked) => return Ok(None),
            Ok(Progress::Taken | Progress::Declined) => Ok(None),
            Err(error) => Err(error),
        };
        request_slot.end(question);
        told
    }

    fn wait(
        &mut self,
        control: &ControlPage<Mapping>,
        question: Question,
        connection: &Connection,
        silence: Duration,
        bear: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<Progress, WireError> {
        let request_slot = control.request_slot();
        let asked = Instant::now();
        let mut silent_since = asked;
        let mut pause = PAUSE_MIN;
        loop {
            match request_slot.progress(question) {
                Progress::Asked if !request_slot.is_listened_to() || asked.elapsed() > HEARING_MAX => {
                    if request_slot.take_back(question) {
                        self.skips = UNHEARD;
                        return Ok(Progress::Asked);
                    }
                }
                Progress::Taken if asked.elapsed() > WATCH => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(PAUSE_MAX);
                    if connection.is_closed() {
                        return Err(WireError::Closed);
                    }
                    if silent_since.elapsed() > silence {
                        bear()?;
                        silent_since = Instant::now();
                    }
                }
                Progress::Asked | Progress::Taken => std::hint::spin_loop(),
                done => return Ok(done),
            }
        }
    }
}
