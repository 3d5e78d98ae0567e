//! The library's own heap.
//!
//! The program's allocator can't be used: a signal handler that uses a file may interrupt it.
//!
//! All of it is one dlmalloc, under one lock. Short freed blocks are kept in a few boxes, and threads take them from
//! there without that lock. LibFS allocates some for each file that it is granted,
//! and a thread that is suspended while it holds the lock stops all others.
//!
//! A large heap goes on growing. So from then on it gets its pages in larger pieces, all populated at once: a page
//! fault costs as much as LibFS's other work for a new file.
//!
//! If the system gives no more memory, there is a reserve (`memory_reserve`).

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicU32, Ordering};

use dlmalloc::Dlmalloc;

use crate::entry::arch::system_call;
use crate::memory::memory_reserve::MemoryReserve;

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;
/// Checks of a lock before a thread sleeps: longer than an allocation takes.
const SPINS: u32 = 100;

/// Sizes of kept blocks: 16 × n + 8 bytes, the room in dlmalloc's own blocks.
const KINDS: usize = 32;
/// Blocks of one size in one box.
const KEPT_MAX: u32 = 64;
/// Blocks that are allocated at once if a box has none.
const FETCHED: usize = 8;
const BOXES: usize = 8;

/// Bytes that dlmalloc asks the system for at a time, unless one block needs more.
const PIECE: usize = 64 << 10;
/// The most bytes that it gets at a time.
const PIECE_MAX: usize = 512 << 10;
/// Once this part of the heap, as a divisor, is more than a piece, dlmalloc gets that part at a time.
const GROWS_BY: usize = 4;

/// Kinds of memory given to dlmalloc: the system's, or from the reserve, which it never gives back.
const SYSTEMS: u32 = 0;
const RESERVED: u32 = 2;

/// A lock for many threads.
///
/// No signal handler that uses the heap interrupts a holder.
struct HeapLock(AtomicU32);

impl HeapLock {
    const fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_contended();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn lock_contended(&self) {
        for _ in 0..SPINS {
            if self.try_lock() {
                return;
            }
            std::hint::spin_loop();
        }
        while self.0.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            let wait = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
            let arguments = [self.0.as_ptr() as u64, wait, WAITED_FOR.into(), 0, 0, 0];
            // SAFETY: the word outlives the call.
            unsafe { system_call(libc::SYS_futex as u64, arguments) };
        }
    }

    #[inline]
    fn unlock(&self) {
        if self.0.swap(FREE, Ordering::Release) == WAITED_FOR {
            let arguments = [self.0.as_ptr() as u64, (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64, 1, 0, 0, 0];
            // SAFETY: the word outlives the call.
            unsafe { system_call(libc::SYS_futex as u64, arguments) };
        }
    }
}

/// Unused blocks, by size: each begins with the address of the next.
struct KeptBlocks {
    first: [*mut u8; KINDS],
    count: [u32; KINDS],
}

#[repr(align(64))]
struct KeptBox {
    lock: HeapLock,
    kept: UnsafeCell<KeptBlocks>,
}

impl KeptBox {
    const fn new() -> Self {
        let kept = KeptBlocks { first: [std::ptr::null_mut(); KINDS], count: [0; KINDS] };
        Self { lock: HeapLock::new(), kept: UnsafeCell::new(kept) }
    }
}

/// The system's memory.
struct Pages {
    /// Bytes that dlmalloc has.
    given: Cell<usize>,
    room: MemoryReserve,
}

impl Pages {
    const fn new() -> Self {
        Self { given: Cell::new(0), room: MemoryReserve::new() }
    }

    /// Records that dlmalloc has given back so many bytes.
    fn record_release(&self, bytes: usize) {
        self.given.set(self.given.get().saturating_sub(bytes));
    }
}

/// Returns the address in the kernel's answer to a call that gives memory.
///
/// Returns null if it gives none.
fn address_in(answer: i64) -> *mut u8 {
    if answer < 0 { std::ptr::null_mut() } else { std::ptr::with_exposed_provenance_mut(answer as usize) }
}

/// Maps new memory; returns null if there is none.
fn map_pages(size: usize, flags: i32) -> *mut u8 {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags) as u64;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    // SAFETY: it replaces no mapping.
    address_in(unsafe { system_call(libc::SYS_mmap as u64, [0, size as u64, protection, flags, u64::MAX, 0]) })
}

// SAFETY: the memory is mapped for nothing else, and as long as stated.
unsafe impl dlmalloc::Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let piece = (self.given.get() / GROWS_BY).min(PIECE_MAX) / PIECE * PIECE;
        let mut found = (std::ptr::null_mut(), 0);
        if size <= PIECE && piece > 0 {
            found = (map_pages(piece, libc::MAP_POPULATE), piece);
        }
        if found.0.is_null() {
            found = (map_pages(size, 0), size);
        }
        let (at, size) = found;
        if at.is_null() {
            return (self.room.take(size), size, RESERVED);
        }
        self.given.set(self.given.get() + size);
        (at, size, SYSTEMS)
    }

    fn remap(&self, at: *mut u8, old: usize, new: usize, can_move: bool) -> *mut u8 {
        let flags = if can_move { libc::MREMAP_MAYMOVE } else { 0 };
        let arguments = [at.expose_provenance() as u64, old as u64, new as u64, flags as u64, 0, 0];
        // SAFETY: dlmalloc has the memory from here.
        let moved = address_in(unsafe { system_call(libc::SYS_mremap as u64, arguments) });
        if !moved.is_null() {
            self.record_release(old);
            self.given.set(self.given.get() + new);
        }
        moved
    }

    fn free_part(&self, at: *mut u8, old: usize, new: usize) -> bool {
        self.free(at.wrapping_add(new), old - new)
    }

    fn free(&self, at: *mut u8, size: usize) -> bool {
        let arguments = [at.expose_provenance() as u64, size as u64, 0, 0, 0, 0];
        // SAFETY: dlmalloc has the memory from here, and uses it no more.
        let is_free = unsafe { system_call(libc::SYS_munmap as u64, arguments) } == 0;
        if is_free {
            self.record_release(size);
        }
        is_free
    }

    fn can_release_part(&self, flags: u32) -> bool {
        // dlmalloc keeps a bit for itself.
        flags != RESERVED >> 1
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

/// The allocator.
pub(crate) struct Heap {
    lock: HeapLock,
    memory: UnsafeCell<Dlmalloc<Pages>>,
    boxes: [KeptBox; BOXES],
}

// SAFETY: the locks keep threads apart.
unsafe impl Sync for Heap {}

/// The right to use the heap: no other thread is in the middle of a call to it.
pub(crate) struct HeldHeap<'a>(&'a Heap);

impl Drop for HeldHeap<'_> {
    fn drop(&mut self) {
        self.0.lock.unlock();
        self.0.boxes.iter().for_each(|kept| kept.lock.unlock());
    }
}

/// Returns the kind of block with room for so much.
///
/// Returns `None` if blocks of that size aren't kept.
#[inline]
fn block_kind(layout: Layout) -> Option<usize> {
    let kind = layout.size().saturating_add(7) / 16;
    (kind < KINDS && layout.align() <= 16).then_some(kind)
}

#[inline]
fn kind_bytes(kind: usize) -> usize {
    kind * 16 + 8
}

impl Heap {
    pub(crate) const fn new() -> Self {
        let memory = UnsafeCell::new(Dlmalloc::new_with_allocator(Pages::new()));
        Self { lock: HeapLock::new(), memory, boxes: [const { KeptBox::new() }; BOXES] }
    }

    /// Keeps all other threads out.
    pub(crate) fn hold(&self) -> HeldHeap<'_> {
        self.boxes.iter().for_each(|kept| kept.lock.lock());
        self.lock.lock();
        HeldHeap(self)
    }

    /// Calls `what` with the heap under its lock.
    #[inline]
    fn with_memory<T>(&self, what: impl FnOnce(&mut Dlmalloc<Pages>) -> T) -> T {
        self.lock.lock();
        // SAFETY: the lock is held, and nothing unwinds.
        let done = what(unsafe { &mut *self.memory.get() });
        self.lock.unlock();
        done
    }

    /// Calls `what` with the reserve.
    pub(crate) fn with_reserve<T>(&self, what: impl FnOnce(&MemoryReserve) -> T) -> T {
        self.with_memory(|memory| what(&memory.allocator().room))
    }

    /// Calls `what` with a box that no thread uses at this moment.
    ///
    /// It first tries a box that other threads rarely use: a thread's stack address chooses its box.
    #[inline]
    fn with_kept<T>(&self, what: impl FnOnce(&mut KeptBlocks) -> T) -> Option<T> {
        let here = 0_u8;
        let first = (&raw const here).addr() >> 18;
        let mut boxes = (0..BOXES).map(|step| &self.boxes[(first + step) % BOXES]);
        let found = boxes.find(|kept| kept.lock.try_lock())?;
        // SAFETY: its lock is held, and nothing unwinds.
        let done = what(unsafe { &mut *found.kept.get() });
        found.lock.unlock();
        Some(done)
    }

    fn take_kept(&self, kind: usize) -> *mut u8 {
        let found = self.with_kept(|kept| {
            let found = kept.first[kind];
            if !found.is_null() {
                // SAFETY: a kept block is unused, and begins with an address.
                kept.first[kind] = unsafe { found.cast::<*mut u8>().read() };
                kept.count[kind] -= 1;
            }
            found
        });
        match found {
            Some(found) if !found.is_null() => found,
            _ => self.fetch_blocks(kind),
        }
    }

    /// Allocates some blocks, and keeps all but one.
    fn fetch_blocks(&self, kind: usize) -> *mut u8 {
        let mut fetched = [std::ptr::null_mut(); FETCHED];
        self.with_memory(|memory| {
            for block in &mut fetched {
                // SAFETY: the size is not 0, and the alignment a power of two.
                *block = unsafe { memory.malloc(kind_bytes(kind), 16) };
            }
        });
        for &block in fetched[1..].iter().filter(|block| !block.is_null()) {
            self.keep_block(block, kind);
        }
        fetched[0]
    }

    fn keep_block(&self, block: *mut u8, kind: usize) {
        let is_kept = self.with_kept(|kept| {
            let has_room = kept.count[kind] < KEPT_MAX;
            if has_room {
                // SAFETY: the caller has given up the block, which has room for an address.
                unsafe { block.cast::<*mut u8>().write(kept.first[kind]) };
                kept.first[kind] = block;
                kept.count[kind] += 1;
            }
            has_room
        });
        if is_kept != Some(true) {
            // SAFETY: it came from there, and is unused.
            self.with_memory(|memory| unsafe { memory.free(block, kind_bytes(kind), 16) });
        }
    }
}

/// Returns the length of a block for a layout: if the kind is kept, always the kind's length.
fn block_bytes(layout: Layout) -> usize {
    block_kind(layout).map_or(layout.size(), kind_bytes)
}

// SAFETY: dlmalloc is an allocator, and its lock is held around each use; no box keeps a block that is in use.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match block_kind(layout) {
            Some(kind) => self.take_kept(kind),
            // SAFETY: the size is not 0.
            _ => self.with_memory(|memory| unsafe { memory.malloc(block_bytes(layout), layout.align()) }),
        }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        match block_kind(layout) {
            Some(kind) => self.keep_block(at, kind),
            // SAFETY: the memory came from here.
            _ => self.with_memory(|memory| unsafe { memory.free(at, block_bytes(layout), layout.align()) }),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match block_kind(layout) {
            Some(kind) => {
                let block = self.take_kept(kind);
                if !block.is_null() {
                    // SAFETY: it has room for that.
                    unsafe { block.write_bytes(0, layout.size()) };
                }
                block
            }
            // SAFETY: the size is not 0.
            _ => self.with_memory(|memory| unsafe { memory.calloc(block_bytes(layout), layout.align()) }),
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller says that it is not too large.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let (had, wanted) = (block_bytes(layout), block_bytes(wanted));
        if had == wanted {
            return at;
        }
        // SAFETY: the memory came from here.
        self.with_memory(|memory| unsafe { memory.realloc(at, had, layout.align(), wanted) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block with the byte that fills it.
    struct Block(*mut u8, Layout, u8);

    fn fill(block: &Block) {
        // SAFETY: the block is as long as that.
        unsafe { block.0.write_bytes(block.2, block.1.size()) };
    }

    fn check(block: &Block) {
        // SAFETY: the block is as long as that, and was written to.
        let bytes = unsafe { std::slice::from_raw_parts(block.0, block.1.size()) };
        assert!(bytes.iter().all(|byte| *byte == block.2), "{:?} holds bytes of another block", block.1);
    }

    /// Threads give blocks to each other, make them longer and shorter, and hold the heap meanwhile.
    #[test]
    fn concurrent_threads_never_share_a_block() {
        static HEAP: Heap = Heap::new();
        let (sender, receiver) = std::sync::mpsc::channel::<(usize, Layout, u8)>();
        let receiver = std::sync::Mutex::new(receiver);
        std::thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let (sender, receiver) = (sender.clone(), &receiver);
                scope.spawn(move || {
                    let mut random = seed;
                    let mut draw = |bound: u64| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        (random >> 33) % bound
                    };
                    for _ in 0..20_000 {
                        let layout = Layout::from_size_align(1 + draw(700) as usize, 1 << draw(6)).expect("a layout");
                        // SAFETY: the layouts are those of the blocks.
                        unsafe {
                            let is_zeroed = draw(3) == 0;
                            let at = if is_zeroed { HEAP.alloc_zeroed(layout) } else { HEAP.alloc(layout) };
                            assert!(!at.is_null() && at.addr() % layout.align() == 0);
                            let mut block = Block(at, layout, 0);
                            if is_zeroed {
                                check(&block);
                            }
                            block.2 = draw(256) as u8;
                            fill(&block);
                            if draw(2) == 0 {
                                let size = 1 + draw(700) as usize;
                                block.0 = HEAP.realloc(block.0, block.1, size);
                                let shorter = size.min(layout.size());
                                block.1 = Layout::from_size_align(shorter, layout.align()).expect("a layout");
                                check(&block);
                                block.1 = Layout::from_size_align(size, layout.align()).expect("a layout");
                                fill(&block);
                            }
                            sender.send((block.0.addr(), block.1, block.2)).expect("sent");
                        }
                        if draw(100) == 0 {
                            drop(HEAP.hold());
                        }
                        let other = if draw(3) > 0 { receiver.lock().expect("no panic").try_recv().ok() } else { None };
                        if let Some((at, layout, content)) = other {
                            let block = Block(at as *mut u8, layout, content);
                            check(&block);
                            // SAFETY: no other thread has received it.
                            unsafe { HEAP.dealloc(block.0, block.1) };
                        }
                    }
                });
            }
        });
    }
}
