//! Requests through shared memory to a SharedFS that listens.
//!
//! The program's thread waits for the answer without sleeping.

use std::time::{Duration, Instant};

use ashlar_pmem::Mapping;
use ashlar_types::Errno;
use ashlar_wire::{Connection, ControlPage, Question, QuestionProgress, Reply, Request, WireError};

/// How long SharedFS may take to notice a request: it usually answers another session meanwhile.
const NOTICE_MAX: Duration = Duration::from_micros(30);
/// How long the thread watches for the answer before it sleeps in between.
const WATCH: Duration = Duration::from_micros(100);
/// The first sleep and the longest one; each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Requests to send as messages after one that SharedFS has not noticed: its listening thread is busy.
const SKIPS_AFTER_UNNOTICED: u32 = 4;

/// The state of the thread that uses the slot.
#[derive(Debug, Default)]
pub(crate) struct SlotClient {
    buffer: Vec<u8>,
    /// How many more requests go as messages.
    skips: u32,
}

/// Returns whether a request may take the slot: one that programs wait for most and SharedFS answers at once.
pub(crate) fn is_short(request: &Request) -> bool {
    use Request::{Acquire, Lookup, Map, ReadDirectory, Unmap};
    matches!(request, Acquire(_) | Lookup { .. } | ReadDirectory { .. } | Map { .. } | Unmap { .. })
}

impl SlotClient {
    /// Sends a request and waits for the answer; `None` if it must go as a message.
    ///
    /// `on_silence` decides how long to accept silence.
    ///
    /// # Errors
    /// [`WireError::Closed`] if the connection to the same SharedFS is closed, and the errors of `on_silence`.
    pub(crate) fn ask(
        &mut self,
        control: &ControlPage<Mapping>,
        request: &Request,
        connection: &mut Connection,
        silence: Duration,
        on_silence: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<Option<Reply>, WireError> {
        let request_slot = control.request_slot();
        if !request_slot.is_listened_to() {
            return Ok(None);
        }
        if self.skips > 0 {
            self.skips -= 1;
            return Ok(None);
        }
        let Some(question) = request_slot.ask_question(request, &mut self.buffer) else { return Ok(None) };
        let waited = self.wait_for_answer(control, question, connection, silence, on_silence);
        let answer = match waited {
            Ok(QuestionProgress::Answered) => request_slot.read_answer(&mut self.buffer).map(Some),
            // The answer is fetched before another thread asks: SharedFS keeps one answer for a session.
            Ok(QuestionProgress::Kept) => match connection.call_watched(&Request::Kept(question), &[], on_silence) {
                Ok((Reply::Error(Errno::EPROTO), _)) => Ok(None),
                fetched => fetched.map(|(reply, _)| Some(reply)),
            },
            // It was taken back.
            Ok(QuestionProgress::Asked) => return Ok(None),
            Ok(QuestionProgress::Taken | QuestionProgress::Declined) => Ok(None),
            Err(error) => Err(error),
        };
        request_slot.end_question(question);
        answer
    }

    fn wait_for_answer(
        &mut self,
        control: &ControlPage<Mapping>,
        question: Question,
        connection: &Connection,
        silence: Duration,
        on_silence: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<QuestionProgress, WireError> {
        let request_slot = control.request_slot();
        let asked = Instant::now();
        let mut silent_since = asked;
        let mut pause = PAUSE_MIN;
        loop {
            match request_slot.progress(question) {
                QuestionProgress::Asked if !request_slot.is_listened_to() || asked.elapsed() > NOTICE_MAX => {
                    if request_slot.take_back(question) {
                        self.skips = SKIPS_AFTER_UNNOTICED;
                        return Ok(QuestionProgress::Asked);
                    }
                }
                QuestionProgress::Taken if asked.elapsed() > WATCH => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(PAUSE_MAX);
                    if connection.is_closed() {
                        return Err(WireError::Closed);
                    }
                    if silent_since.elapsed() > silence {
                        on_silence()?;
                        silent_since = Instant::now();
                    }
                }
                QuestionProgress::Asked | QuestionProgress::Taken => std::hint::spin_loop(),
                done => return Ok(done),
            }
        }
    }
}
