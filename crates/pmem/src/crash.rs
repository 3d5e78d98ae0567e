//! A stand-in for mapped memory that knows the states a crash may leave.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::shared_words::{PAGE_WORDS, SharedWords};
use crate::write_gate::WriteGate;
use crate::{OutOfBounds, Persistent};

const WORD_BYTES: usize = 8;
const LINE_WORDS: usize = crate::flush::LINE_BYTES / WORD_BYTES;

/// The crash model that a [`CrashTwin`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashMedium {
    /// Persistent memory: words survive one by one; flush and fence settle them.
    Words,
    /// A disk file: pages survive one by one; only [`Persistent::sync`] and the kernel's own write-back settle them.
    Pages,
}

/// The unsettled values of one word.
#[derive(Clone, Debug)]
struct Unsettled {
    /// The values given since the settled one, oldest first.
    values: Vec<u64>,
    /// How many of them a flush has covered.
    flushed: usize,
}

/// Memory in the middle of a run: the values that programs see, and those that the medium holds or may hold.
#[derive(Clone)]
pub struct CrashState {
    medium: CrashMedium,
    current: SharedWords,
    settled: SharedWords,
    unsettled: BTreeMap<usize, Unsettled>,
    scrambled: Vec<Range<usize>>,
    persist_points: u64,
}

impl fmt::Debug for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CrashState")
            .field("words", &self.current.len())
            .field("unsettled", &self.unsettled.len())
            .field("persist_points", &self.persist_points)
            .finish_non_exhaustive()
    }
}

impl CrashState {
    fn put(&mut self, index: usize, value: u64) {
        let old = std::mem::replace(self.current.word_mut(index), value);
        if self.scrambled.iter().any(|words| words.contains(&index)) {
            return;
        }
        let word = self.unsettled.entry(index).or_insert(Unsettled { values: Vec::new(), flushed: 0 });
        if word.values.last() != Some(&value) && !(word.values.is_empty() && old == value) {
            word.values.push(value);
        }
        if word.values.is_empty() {
            self.unsettled.remove(&index);
        }
    }

    fn flush(&mut self, words: Range<usize>) {
        for word in self.unsettled.range_mut(words).map(|(_, word)| word) {
            word.flushed = word.values.len();
        }
    }

    fn fence(&mut self) {
        let settled = &mut self.settled;
        self.unsettled.retain(|&index, word| {
            if word.flushed > 0 {
                *settled.word_mut(index) = word.values[word.flushed - 1];
                word.values.drain(..word.flushed);
                word.flushed = 0;
            }
            !word.values.is_empty()
        });
    }

    fn settle(&mut self, words: Range<usize>) {
        self.flush(words);
        self.fence();
    }

    /// How many words are clean no longer.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    /// How many flushes, fences and syncs there have been.
    #[must_use]
    pub fn persist_points(&self) -> u64 {
        self.persist_points
    }

    /// Returns images of the memory that a crash at this moment may leave.
    ///
    /// If there are no more than `limit`, it returns all of them. Otherwise it returns `limit` of them: with none of
    /// the unsettled words, all, all but one, one alone, and subsets drawn from `seed`.
    #[must_use]
    pub fn crash_images(&self, seed: u64, limit: usize) -> CrashImages {
        let choices: Vec<Choice> = match self.medium {
            CrashMedium::Words => self
                .unsettled
                .iter()
                .map(|(&index, word)| Choice {
                    start: index,
                    contents: std::iter::once(self.settled[index])
                        .chain(word.values.iter().copied())
                        .map(|v| vec![v])
                        .collect(),
                })
                .collect(),
            CrashMedium::Pages => self
                .unsettled_pages()
                .into_iter()
                .map(|page| Choice {
                    start: page * PAGE_WORDS,
                    contents: vec![self.settled.page(page).to_vec(), self.current.page(page).to_vec()],
                })
                .collect(),
        };
        let total = choices.iter().try_fold(1usize, |product, choice| product.checked_mul(choice.contents.len()));
        let exhaustive = total.filter(|&total| total <= limit);
        CrashImages {
            settled: self.settled.clone(),
            scrambled: self.scrambled.clone(),
            choices,
            next: 0,
            limit: exhaustive.unwrap_or(limit),
            exhaustive: exhaustive.is_some(),
            seed,
        }
    }

    fn crash_words(&self, choose: &mut dyn FnMut(usize) -> usize) -> SharedWords {
        let mut words = self.settled.clone();
        let mut done = 0;
        for (&index, word) in &self.unsettled {
            match self.medium {
                CrashMedium::Words => match choose(1 + word.values.len()) {
                    0 => {}
                    chosen => *words.word_mut(index) = word.values[chosen - 1],
                },
                CrashMedium::Pages if index < done => {}
                CrashMedium::Pages => {
                    let page = index / PAGE_WORDS;
                    done = (page + 1) * PAGE_WORDS;
                    if choose(2) == 1 {
                        words.set_page(page, &self.current);
                    }
                }
            }
        }
        words
    }

    /// The numbers of the pages that hold unsettled words.
    fn unsettled_pages(&self) -> Vec<usize> {
        let mut pages: Vec<usize> = self.unsettled.keys().map(|index| index / PAGE_WORDS).collect();
        pages.dedup();
        pages
    }

    /// The memory as programs see it now.
    #[must_use]
    pub fn current(&self) -> Vec<u8> {
        bytes(&self.current)
    }
}

#[derive(Clone, Debug)]
struct Choice {
    start: usize,
    contents: Vec<Vec<u64>>,
}

/// Iterator over crash images: [`CrashState::crash_images`].
#[derive(Clone, Debug)]
pub struct CrashImages {
    settled: SharedWords,
    scrambled: Vec<Range<usize>>,
    choices: Vec<Choice>,
    next: usize,
    limit: usize,
    exhaustive: bool,
    seed: u64,
}

impl CrashImages {
    /// Whether every possible image is among these.
    #[must_use]
    pub fn is_exhaustive(&self) -> bool {
        self.exhaustive
    }

    fn pick(&mut self, image: usize, choice: usize, rest: &mut usize) -> usize {
        let options = self.choices[choice].contents.len();
        if self.exhaustive {
            let picked = *rest % options;
            *rest /= options;
            return picked;
        }
        let count = self.choices.len();
        match image {
            0 => 0,
            1 => options - 1,
            // One word alone is lost, or survives alone: the subsets that catch a missing flush or a wrong order
            // soonest.
            _ if image < 2 + count && image % 2 == 0 => {
                if choice == image - 2 {
                    0
                } else {
                    options - 1
                }
            }
            _ if image < 2 + count => {
                if choice == image - 2 {
                    options - 1
                } else {
                    0
                }
            }
            _ => {
                self.seed = splitmix(self.seed);
                (self.seed >> 33) as usize % options
            }
        }
    }
}

impl Iterator for CrashImages {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.next >= self.limit {
            return None;
        }
        let image = self.next;
        self.next += 1;
        let mut rest = image;
        let mut words = self.settled.clone();
        for choice in 0..self.choices.len() {
            let picked = self.pick(image, choice, &mut rest);
            let Choice { start, contents } = &self.choices[choice];
            for (index, word) in (*start..).zip(&contents[picked]) {
                *words.word_mut(index) = *word;
            }
        }
        let mut noise = self.seed ^ image as u64;
        for word in self.scrambled.iter().cloned().flatten() {
            noise = splitmix(noise);
            *words.word_mut(word) = noise;
        }
        Some(bytes(&words))
    }
}

/// The next state of the splitmix64 generator, mixed.
fn splitmix(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn bytes(words: &SharedWords) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(words.len() * WORD_BYTES);
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
    bytes
}

/// The callback of [`CrashTwin::on_persist`].
type Observer = Box<dyn FnMut(&CrashTwin) + Send>;

/// Memory in the heap that keeps, for every aligned word, the values that a crash may leave in it.
///
/// The model is at the top of this crate. Threads may share the memory. A fence of one thread settles the flushes of
/// all, which is right for enumerations, whose runs have one thread.
pub struct CrashTwin {
    inner: Mutex<Inner>,
    length: u64,
    gate: Option<Arc<WriteGate>>,
}

struct Inner {
    state: CrashState,
    observer: Option<Observer>,
}

impl fmt::Debug for CrashTwin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.lock().state.fmt(f)
    }
}

impl CrashTwin {
    /// Zeroed memory of `length` bytes, rounded up to whole words.
    #[must_use]
    pub fn new(medium: CrashMedium, length: usize) -> Self {
        Self::from_words(medium, SharedWords::zeros(length.div_ceil(WORD_BYTES)))
    }

    /// Memory as a crash left it: all of it settled.
    #[must_use]
    pub fn from_image(medium: CrashMedium, image: &[u8]) -> Self {
        let mut words = SharedWords::zeros(image.len().div_ceil(WORD_BYTES));
        for (index, chunk) in image.chunks(WORD_BYTES).enumerate() {
            let mut word = [0; WORD_BYTES];
            word[..chunk.len()].copy_from_slice(chunk);
            if word != [0; WORD_BYTES] {
                *words.word_mut(index) = u64::from_ne_bytes(word);
            }
        }
        Self::from_words(medium, words)
    }

    fn from_words(medium: CrashMedium, words: SharedWords) -> Self {
        Self::from_state(CrashState {
            medium,
            settled: words.clone(),
            current: words,
            unsettled: BTreeMap::new(),
            scrambled: Vec::new(),
            persist_points: 0,
        })
    }

    fn from_state(state: CrashState) -> Self {
        let length = (state.current.len() * WORD_BYTES) as u64;
        Self { inner: Mutex::new(Inner { state, observer: None }), length, gate: None }
    }

    /// Returns other memory in the same state, without an observer and without a gate.
    #[must_use]
    pub fn copy(&self) -> Self {
        Self::from_state(self.state())
    }

    /// Returns other memory that a crash at this moment may leave.
    ///
    /// `choose` is called for every unsettled word or page. It gets the number of possible contents, from the settled
    /// one to the newest, and returns the index of one.
    #[must_use]
    pub fn after_crash(&self, choose: &mut dyn FnMut(usize) -> usize) -> Self {
        let inner = self.inner.lock();
        Self::from_words(inner.state.medium, inner.state.crash_words(choose))
    }

    /// Returns this memory with a gate for all writes to it.
    #[must_use]
    pub fn behind_gate(self, gate: &Arc<WriteGate>) -> Self {
        Self { gate: Some(Arc::clone(gate)), ..self }
    }

    fn admits_write(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.admits())
    }

    /// Whether the process that uses the memory goes on.
    fn is_used(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| !gate.is_closed())
    }

    /// Calls `observer` at every persist point (flush, fence, sync), just before it takes effect.
    ///
    /// A crash there is the worst of the moments since the persist point before. The observer may use this memory, and
    /// does not see its own operations.
    pub fn on_persist(&self, observer: Observer) {
        self.inner.lock().observer = Some(observer);
    }

    /// Stops calling the observer.
    pub fn stop_observing(&self) {
        self.inner.lock().observer = None;
    }

    /// Declares that recovery must not depend on these bytes (whole words): they are no longer tracked, and every crash
    /// image has noise there.
    pub fn scramble(&self, offsets: Range<u64>) {
        let words = offsets.start as usize / WORD_BYTES..(offsets.end as usize).div_ceil(WORD_BYTES);
        let state = &mut self.inner.lock().state;
        let end = words.end.min(state.current.len());
        state.unsettled.retain(|index, _| !words.contains(index));
        state.scrambled.push(words.start.min(end)..end);
    }

    /// The state at this moment.
    #[must_use]
    pub fn state(&self) -> CrashState {
        self.inner.lock().state.clone()
    }

    /// Images that a crash at this moment may leave: [`CrashState::crash_images`].
    #[must_use]
    pub fn crash_images(&self, seed: u64, limit: usize) -> CrashImages {
        self.inner.lock().state.crash_images(seed, limit)
    }

    /// The numbers of the pages that hold unsettled words.
    #[must_use]
    pub fn unsettled_pages(&self) -> Vec<usize> {
        self.inner.lock().state.unsettled_pages()
    }

    /// Settles one page as the kernel's write-back may at any moment.
    pub fn write_back_page(&self, page: usize) {
        self.inner.lock().state.settle(page * PAGE_WORDS..(page + 1) * PAGE_WORDS);
    }

    /// Counts a persist point, and calls the observer. It is taken out meanwhile.
    fn report_persist(&self) {
        let observer = {
            let mut inner = self.inner.lock();
            inner.state.persist_points += 1;
            inner.observer.take()
        };
        if let Some(mut observer) = observer {
            observer(self);
            self.inner.lock().observer.get_or_insert(observer);
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        if offset > self.length || length > self.length - offset {
            return Err(OutOfBounds { offset, length, available: self.length });
        }
        Ok(())
    }

    fn word(&self, offset: u64) -> Result<usize, OutOfBounds> {
        self.check(offset, WORD_BYTES as u64)?;
        if offset % WORD_BYTES as u64 != 0 {
            return Err(OutOfBounds { offset, length: WORD_BYTES as u64, available: self.length });
        }
        Ok(offset as usize / WORD_BYTES)
    }
}

impl Persistent for CrashTwin {
    fn len(&self) -> u64 {
        self.length
    }

    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(offset, into.len() as u64)?;
        let inner = self.inner.lock();
        for (place, byte) in (offset as usize..).zip(into) {
            *byte = inner.state.current[place / WORD_BYTES].to_ne_bytes()[place % WORD_BYTES];
        }
        Ok(())
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(offset, bytes.len() as u64)?;
        let mut inner = self.inner.lock();
        let mut place = offset as usize;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (index, skip) = (place / WORD_BYTES, place % WORD_BYTES);
            let count = rest.len().min(WORD_BYTES - skip);
            let mut word = inner.state.current[index].to_ne_bytes();
            word[skip..skip + count].copy_from_slice(&rest[..count]);
            if self.admits_write() {
                inner.state.put(index, u64::from_ne_bytes(word));
            }
            place += count;
            rest = &rest[count..];
        }
        Ok(())
    }

    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        let index = self.word(offset)?;
        Ok(self.inner.lock().state.current[index])
    }

    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        let index = self.word(offset)?;
        if self.admits_write() {
            self.inner.lock().state.put(index, value);
        }
        Ok(())
    }

    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        let index = self.word(offset)?;
        let mut inner = self.inner.lock();
        let found = inner.state.current[index];
        if found != current {
            return Ok(Err(found));
        }
        if self.admits_write() {
            inner.state.put(index, new);
        }
        Ok(Ok(found))
    }

    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        self.check(offset, length)?;
        if !self.is_used() {
            return Ok(());
        }
        self.report_persist();
        let mut inner = self.inner.lock();
        if inner.state.medium == CrashMedium::Words && length > 0 {
            let first = offset as usize / WORD_BYTES / LINE_WORDS * LINE_WORDS;
            let last = (offset + length - 1) as usize / WORD_BYTES;
            inner.state.flush(first..(last / LINE_WORDS + 1) * LINE_WORDS);
        }
        Ok(())
    }

    fn fence(&self) {
        if !self.is_used() {
            return;
        }
        self.report_persist();
        let mut inner = self.inner.lock();
        if inner.state.medium == CrashMedium::Words {
            inner.state.fence();
        }
    }

    fn sync(&self) -> io::Result<()> {
        if !self.is_used() {
            return Ok(());
        }
        self.report_persist();
        let mut inner = self.inner.lock();
        if inner.state.medium == CrashMedium::Pages {
            inner.state.settle(0..usize::MAX);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn words(image: &[u8]) -> Vec<u64> {
        image.chunks(8).map(|chunk| u64::from_ne_bytes(chunk.try_into().unwrap())).collect()
    }

    fn images(twin: &CrashTwin) -> BTreeSet<Vec<u64>> {
        let images = twin.crash_images(1, 1000);
        assert!(images.is_exhaustive());
        images.map(|image| words(&image)).collect()
    }

    fn set<const N: usize>(values: [&[u64]; N]) -> BTreeSet<Vec<u64>> {
        values.into_iter().map(<[u64]>::to_vec).collect()
    }

    #[test]
    fn every_subset_of_unsettled_words_and_every_value_may_survive() {
        let twin = CrashTwin::new(CrashMedium::Words, 16);
        twin.store_u64(0, 1).unwrap();
        twin.store_u64(0, 2).unwrap();
        twin.store_u64(8, 9).unwrap();
        assert_eq!(images(&twin), set([&[0, 0], &[0, 9], &[1, 0], &[1, 9], &[2, 0], &[2, 9]]));
    }

    #[test]
    fn only_flush_and_then_fence_settle() {
        let twin = CrashTwin::new(CrashMedium::Words, 128);
        twin.store_u64(0, 1).unwrap();
        twin.store_u64(64, 1).unwrap();
        twin.fence();
        assert_eq!(twin.state().unsettled(), 2);
        twin.flush(1, 1).unwrap();
        assert_eq!(twin.state().unsettled(), 2);
        // Stored after the flush, so the fence settles the older value only.
        twin.store_u64(0, 2).unwrap();
        twin.fence();
        let left: BTreeSet<(u64, u64)> = images(&twin).iter().map(|image| (image[0], image[8])).collect();
        assert_eq!(left, BTreeSet::from([(1, 0), (1, 1), (2, 0), (2, 1)]));
        twin.flush(0, 128).unwrap();
        twin.fence();
        assert_eq!(twin.state().unsettled(), 0);
        assert_eq!(images(&twin).len(), 1);
    }

    #[test]
    fn pages_survive_whole_and_only_sync_settles_them() {
        let twin = CrashTwin::new(CrashMedium::Pages, 8192);
        twin.store_u64(0, 1).unwrap();
        twin.store_u64(8, 2).unwrap();
        twin.store_u64(4096, 3).unwrap();
        twin.flush(0, 8192).unwrap();
        twin.fence();
        let left: BTreeSet<_> = images(&twin).iter().map(|image| (image[0], image[1], image[512])).collect();
        assert_eq!(left, BTreeSet::from([(0, 0, 0), (1, 2, 0), (0, 0, 3), (1, 2, 3)]));
        twin.write_back_page(0);
        assert_eq!(images(&twin).len(), 2);
        twin.sync().unwrap();
        assert_eq!(images(&twin).len(), 1);
    }

    #[test]
    fn observers_see_every_persist_point_before_it_takes_effect() {
        let twin = CrashTwin::new(CrashMedium::Words, 64);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        twin.on_persist(Box::new(move |twin| log.lock().push(twin.state().unsettled())));
        twin.store_u64(0, 1).unwrap();
        twin.flush(0, 8).unwrap();
        twin.fence();
        twin.sync().unwrap();
        twin.stop_observing();
        twin.fence();
        assert_eq!(*seen.lock(), [1, 1, 0]);
        assert_eq!(twin.state().persist_points(), 4);
    }

    #[test]
    fn scrambled_words_are_noise_in_every_image() {
        let twin = CrashTwin::new(CrashMedium::Words, 64);
        twin.store_u64(8, 1).unwrap();
        twin.scramble(8..24);
        twin.store_u64(16, 1).unwrap();
        twin.store_u64(24, 1).unwrap();
        let images: Vec<_> = twin.crash_images(3, 10).map(|image| words(&image)).collect();
        assert_eq!(images.len(), 2);
        assert!(images.iter().all(|image| image[1] > 1 && image[2] > 1 && image[0] == 0));
        assert_eq!(twin.load_u64(16).unwrap(), 1);
    }

    #[test]
    fn stores_touch_only_the_words_they_change() {
        let twin = CrashTwin::new(CrashMedium::Words, 64);
        twin.store(6, &[1, 2, 3]).unwrap();
        assert_eq!(twin.state().unsettled(), 2);
        let mut bytes = [0; 5];
        twin.load(5, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 1, 2, 3, 0]);
        twin.store(32, &[0; 16]).unwrap();
        assert_eq!(twin.state().unsettled(), 2);
        assert!(twin.store(60, &[0; 5]).is_err());
        assert!(twin.load_u64(4).is_err());
    }

    #[test]
    fn gate_ends_process_at_planned_write() {
        let gate = Arc::new(WriteGate::default());
        let twin = CrashTwin::new(CrashMedium::Words, 64).behind_gate(&gate);
        twin.store_u64(0, 1).unwrap();
        gate.plan_end(1);
        twin.store_u64(8, 1).unwrap();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| twin.store_u64(16, 1)));
        assert!(ended.is_err() && gate.is_closed());
        twin.store_u64(24, 1).unwrap();
        assert_eq!(twin.compare_exchange_u64(24, 0, 1).unwrap(), Ok(0));
        gate.open();
        twin.store_u64(32, 1).unwrap();
        assert_eq!([0, 8, 16, 24, 32].map(|at| twin.load_u64(at).unwrap()), [1, 1, 0, 0, 1]);
    }

    #[test]
    fn sampled_images_keep_settled_words_and_differ() {
        let twin = CrashTwin::new(CrashMedium::Words, 64 * 8);
        twin.store_u64(0, 5).unwrap();
        twin.flush(0, 8).unwrap();
        twin.fence();
        for word in 1..64 {
            twin.store_u64(word * 8, word).unwrap();
        }
        let images = twin.crash_images(7, 300);
        assert!(!images.is_exhaustive());
        let images: Vec<_> = images.map(|image| words(&image)).collect();
        assert_eq!(images.len(), 300);
        assert!(images.iter().all(|image| image[0] == 5 && (1..64).all(|i| [0, i as u64].contains(&image[i]))));
        assert!(images.iter().collect::<BTreeSet<_>>().len() > 250);
    }
}
