//! A question to SharedFS and its answer in shared memory.
//!
//! While both sides are awake, they make no system call and wake no thread. Each session has one request slot, at the
//! end of its control page:
//!
//! ```text
//!     0  listening:8                             SharedFS writes; 0: SharedFS does not check the slot
//!    64  word:8 = turn << 3 | state              both
//!    72  length:8   length:8                     of the question, the session writes; of the answer, SharedFS
//!   128  the question, in postcard encoding, up to byte 4096
//!  4096  the answer, likewise, up to byte 32,768
//! ```
//!
//! States: *free* → *asked* (the session) → *taken* (SharedFS) → *answered*, *kept* or *declined* (SharedFS) → *free*
//! (the session).
//!
//! - *Kept*: the answer is too long, and the session fetches it by a message ([`crate::Request::Kept`]).
//! - *Declined*: the session must ask by a message.
//!
//! If SharedFS does not take a question soon, the session takes it back (asked → free) and asks by a message. So a
//! SharedFS that stops checking the slot need not announce it. If a SharedFS has taken a question and ended, the
//! session abandons the question (→ free). The turn keeps a late answer from being read as another question's.
//!
//! The session can write all of it. SharedFS copies the question before it decodes it, and answers nothing that it
//! would not say by a message.

use ashlar_pmem::{CheckedMemory, PartAt, Persistent, WordAt};
use serde::{Deserialize, Serialize};

use crate::{Reply, Request, WireError};

/// Bytes that a request slot takes.
pub(crate) const REQUEST_SLOT_BYTES: u64 = 32_768;
const LISTENING: SlotWord = SlotWord::new(0);
const WORD: SlotWord = SlotWord::new(64);
const QUESTION_LENGTH: SlotWord = SlotWord::new(72);
const ANSWER_LENGTH: SlotWord = SlotWord::new(80);
const QUESTION: PartAt<REQUEST_SLOT_BYTES, QUESTION_BYTES> = PartAt::new(128);
const ANSWER: PartAt<REQUEST_SLOT_BYTES, ANSWER_BYTES> = PartAt::new(4096);
const QUESTION_BYTES: u64 = 4096 - 128;
const ANSWER_BYTES: u64 = REQUEST_SLOT_BYTES - 4096;

/// The offset of a word in a request slot.
type SlotWord = WordAt<REQUEST_SLOT_BYTES>;

const STATE_BITS: u32 = 3;
const FREE: u64 = 0;
const ASKED: u64 = 1;
const TAKEN: u64 = 2;
const ANSWERED: u64 = 3;
const KEPT: u64 = 4;
const DECLINED: u64 = 5;

/// A question on its way, named by its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question(u64);

impl Question {
    fn word(self, state: u64) -> u64 {
        self.0 << STATE_BITS | state
    }
}

/// The progress of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuestionProgress {
    /// SharedFS has not taken it yet.
    Asked,
    /// SharedFS works on it.
    Taken,
    /// The answer is in the slot.
    Answered,
    /// The session must fetch the answer by a message.
    Kept,
    /// The session must ask by a message.
    Declined,
}

/// A session's request slot, in a part of its control page of `BYTES` bytes.
#[derive(Debug)]
pub struct RequestSlot<'a, M, const BYTES: u64> {
    memory: &'a CheckedMemory<M, BYTES>,
    at: PartAt<BYTES, REQUEST_SLOT_BYTES>,
}

impl<'a, M: Persistent, const BYTES: u64> RequestSlot<'a, M, BYTES> {
    pub(crate) fn new(memory: &'a CheckedMemory<M, BYTES>, at: PartAt<BYTES, REQUEST_SLOT_BYTES>) -> Self {
        Self { memory, at }
    }

    fn load(&self, word: SlotWord) -> u64 {
        self.memory.load(self.at.word(word))
    }

    fn store(&self, word: SlotWord, value: u64) {
        self.memory.store(self.at.word(word), value);
    }

    fn change(&self, current: u64, new: u64) -> bool {
        self.memory.exchange(self.at.word(WORD), current, new).is_ok()
    }

    /// Whether SharedFS checks the slot.
    pub fn is_listened_to(&self) -> bool {
        self.load(LISTENING) != 0
    }

    /// Publishes whether SharedFS checks the slot.
    pub fn set_listening(&self, listens: bool) {
        self.store(LISTENING, u64::from(listens));
    }

    /// Puts a question into the slot; `None` if it is too long.
    ///
    /// The session calls this, and the methods up to [`Self::end_question`], one thread at a time.
    pub fn ask_question(&self, request: &Request, buffer: &mut Vec<u8>) -> Option<Question> {
        let before = self.load(WORD);
        if before & ((1 << STATE_BITS) - 1) != FREE {
            return None;
        }
        buffer.clear();
        *buffer = postcard::to_extend(request, std::mem::take(buffer)).ok()?;
        if buffer.len() as u64 > QUESTION_BYTES {
            return None;
        }
        let turn = Question((before >> STATE_BITS).wrapping_add(1) & (u64::MAX >> STATE_BITS));
        self.memory.store_bytes(self.at.part(QUESTION), buffer);
        self.store(QUESTION_LENGTH, buffer.len() as u64);
        self.change(before, turn.word(ASKED)).then_some(turn)
    }

    /// Returns the progress of a question.
    pub fn progress(&self, question: Question) -> QuestionProgress {
        let word = self.load(WORD);
        if word == question.word(ASKED) {
            QuestionProgress::Asked
        } else if word == question.word(TAKEN) {
            QuestionProgress::Taken
        } else if word == question.word(ANSWERED) {
            QuestionProgress::Answered
        } else if word == question.word(KEPT) {
            QuestionProgress::Kept
        } else {
            QuestionProgress::Declined
        }
    }

    /// Takes back a question that SharedFS has not taken; `false` if it has.
    pub fn take_back(&self, question: Question) -> bool {
        self.change(question.word(ASKED), question.word(FREE))
    }

    /// Reads the answer.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if it can't be decoded.
    pub fn read_answer(&self, buffer: &mut Vec<u8>) -> Result<Reply, WireError> {
        buffer.resize(self.load(ANSWER_LENGTH).min(ANSWER_BYTES) as usize, 0);
        self.memory.load_bytes(self.at.part(ANSWER), buffer);
        postcard::from_bytes(buffer).map_err(|_| WireError::Malformed)
    }

    /// Ends a question, answered or not.
    pub fn end_question(&self, question: Question) {
        self.store(WORD, question.word(FREE));
    }

    /// Whether the slot holds a question that SharedFS has not taken.
    pub fn is_asked(&self) -> bool {
        self.load(WORD) & ((1 << STATE_BITS) - 1) == ASKED
    }

    /// Takes a question, if the slot holds one that can be decoded; others are declined.
    ///
    /// SharedFS calls this, and the methods that follow.
    pub fn take_question(&self, buffer: &mut Vec<u8>) -> Option<(Question, Request)> {
        let word = self.load(WORD);
        let turn = Question(word >> STATE_BITS);
        if word != turn.word(ASKED) || !self.change(word, turn.word(TAKEN)) {
            return None;
        }
        buffer.resize(self.load(QUESTION_LENGTH).min(QUESTION_BYTES) as usize, 0);
        self.memory.load_bytes(self.at.part(QUESTION), buffer);
        match postcard::from_bytes(buffer) {
            Ok(request) => Some((turn, request)),
            Err(_) => {
                self.decline_question(turn);
                None
            }
        }
    }

    /// Answers a question that was taken; `false` if the answer is too long.
    ///
    /// If the session has abandoned the question meanwhile, the answer has no reader.
    pub fn send_answer(&self, question: Question, reply: &Reply, buffer: &mut Vec<u8>) -> bool {
        buffer.clear();
        match postcard::to_extend(reply, std::mem::take(buffer)) {
            Ok(bytes) => *buffer = bytes,
            Err(_) => return false,
        }
        if buffer.len() as u64 > ANSWER_BYTES {
            return false;
        }
        if self.load(WORD) == question.word(TAKEN) {
            self.memory.store_bytes(self.at.part(ANSWER), buffer);
            self.store(ANSWER_LENGTH, buffer.len() as u64);
            self.change(question.word(TAKEN), question.word(ANSWERED));
        }
        true
    }

    /// Marks the answer as one that the session must fetch.
    pub fn keep_answer(&self, question: Question) {
        self.change(question.word(TAKEN), question.word(KEPT));
    }

    /// Marks the question as one that the session must ask by a message.
    pub fn decline_question(&self, question: Question) {
        self.change(question.word(TAKEN), question.word(DECLINED));
    }
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::{Mapping, MappingAccess, Medium};
    use ashlar_types::InodeId;

    use super::*;
    use crate::{CONTROL_BYTES, ControlPage, DirectoryEntry};

    fn page() -> ControlPage<Mapping> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(CONTROL_BYTES).expect("a length");
        let memory = Mapping::map(&file, CONTROL_BYTES, MappingAccess::ReadWrite, Medium::MEMORY).expect("mapped");
        ControlPage::new(memory).expect("a page")
    }

    fn lookup(name: &[u8]) -> Request {
        let (directory, name) = (InodeId::ROOT, name.to_vec());
        Request::Lookup { directory, name, within: None, makes: false, write: false, need: crate::Need::default() }
    }

    fn is_lookup(request: &Request, expected: &[u8]) -> bool {
        matches!(request, Request::Lookup { name, .. } if name == expected)
    }

    /// Makes a reply whose encoding is a dozen bytes longer than this.
    fn entry(bytes: usize) -> Reply {
        let kind = ashlar_types::FileKind::Regular;
        Reply::Entries(vec![DirectoryEntry { cookie: 3, name: vec![7; bytes], inode: InodeId(1), kind }])
    }

    #[test]
    fn question_is_answered_kept_or_declined() {
        let page = page();
        let request_slot = page.request_slot();
        let mut bytes = Vec::new();
        assert!(request_slot.take_question(&mut bytes).is_none() && !request_slot.is_asked());
        for turn in 0..10 {
            let question = request_slot.ask_question(&lookup(&[turn; 100]), &mut bytes).expect("asked");
            assert!(request_slot.is_asked() && request_slot.progress(question) == QuestionProgress::Asked);
            assert!(request_slot.ask_question(&lookup(b"another"), &mut bytes).is_none(), "one at a time");
            let (taken, request) = request_slot.take_question(&mut bytes).expect("it is there");
            assert!(taken == question && is_lookup(&request, &[turn; 100]));
            assert!(!request_slot.take_back(question) && request_slot.progress(question) == QuestionProgress::Taken);
            assert!(request_slot.send_answer(taken, &Reply::Inodes(InodeId(u64::from(turn)), 5), &mut bytes));
            assert_eq!(request_slot.progress(question), QuestionProgress::Answered);
            let reply = request_slot.read_answer(&mut bytes).expect("a reply");
            assert!(matches!(reply, Reply::Inodes(first, 5) if first.0 == u64::from(turn)));
            request_slot.end_question(question);
        }
        for progress in [QuestionProgress::Kept, QuestionProgress::Declined] {
            let question = request_slot.ask_question(&lookup(b"x"), &mut bytes).expect("asked");
            let (taken, _) = request_slot.take_question(&mut bytes).expect("it is there");
            match progress {
                QuestionProgress::Kept => request_slot.keep_answer(taken),
                _ => request_slot.decline_question(taken),
            }
            assert_eq!(request_slot.progress(question), progress);
            request_slot.end_question(question);
        }
        let question = request_slot.ask_question(&lookup(&[7; 3900]), &mut bytes).expect("asked");
        assert!(request_slot.take_back(question) && request_slot.take_question(&mut bytes).is_none());
        assert!(request_slot.ask_question(&lookup(&[7; 3969]), &mut bytes).is_none(), "too long");
        let question = request_slot.ask_question(&lookup(b"x"), &mut bytes).expect("asked");
        let (taken, _) = request_slot.take_question(&mut bytes).expect("it is there");
        assert!(!request_slot.send_answer(taken, &entry(28_672), &mut bytes), "too long");
        assert_eq!(request_slot.progress(question), QuestionProgress::Taken);
        assert!(request_slot.send_answer(taken, &entry(28_600), &mut bytes));
        let reply = request_slot.read_answer(&mut bytes).expect("a reply");
        assert!(matches!(reply, Reply::Entries(entries) if entries[0].name == [7; 28_600]));
    }

    #[test]
    fn late_answer_reaches_no_other_question() {
        let page = page();
        let request_slot = page.request_slot();
        let mut bytes = Vec::new();
        let first = request_slot.ask_question(&lookup(b"first"), &mut bytes).expect("asked");
        let (taken, _) = request_slot.take_question(&mut bytes).expect("it is there");
        // The session takes SharedFS for dead.
        request_slot.end_question(first);
        let second = request_slot.ask_question(&lookup(b"second"), &mut bytes).expect("asked");
        assert!(request_slot.send_answer(taken, &entry(20), &mut bytes), "no question receives it");
        request_slot.decline_question(taken);
        assert_eq!(request_slot.progress(second), QuestionProgress::Asked);
        let (taken, request) = request_slot.take_question(&mut bytes).expect("it is there");
        assert!(taken == second && is_lookup(&request, b"second"));
    }

    #[test]
    fn forged_question_stays_harmless() {
        let page = page();
        let base = CONTROL_BYTES - REQUEST_SLOT_BYTES;
        let (request_slot, mut bytes) = (page.request_slot(), Vec::new());
        for word in (0..1 << (STATE_BITS + 1)).chain([u64::MAX, u64::MAX - 6]) {
            page.memory().store_u64(base + WORD.offset(), word).expect("stored");
            page.memory().store_u64(base + QUESTION_LENGTH.offset(), u64::MAX).expect("stored");
            page.memory().store(base + QUESTION.offset(), &[0xff; 64]).expect("stored");
            assert!(request_slot.take_question(&mut bytes).is_none(), "{word:#x}");
            let after = page.memory().load_u64(base + WORD.offset()).expect("loaded");
            assert_eq!(after & 7, if word & 7 == ASKED { DECLINED } else { word & 7 }, "{word:#x}");
        }
    }
}
