//! Words in pages that copies share until one of them changes.

use std::ops::Index;
use std::sync::Arc;

/// Words of a page.
pub const PAGE_WORDS: usize = 4096 / 8;

type Page = [u64; PAGE_WORDS];

/// Words whose copies cost a pointer for each page.
#[derive(Clone, Debug)]
pub struct SharedWords {
    pages: Vec<Arc<Page>>,
    length: usize,
}

impl SharedWords {
    /// Returns so many zeros.
    pub fn zeros(length: usize) -> Self {
        let (page, pages) = (Arc::new([0; PAGE_WORDS]), length.div_ceil(PAGE_WORDS));
        Self { pages: std::iter::repeat_n(page, pages).collect(), length }
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns all words.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().flat_map(|page| page.iter().copied()).take(self.length)
    }

    /// Returns a word that may be changed.
    pub fn word_mut(&mut self, index: usize) -> &mut u64 {
        assert!(index < self.length, "word {index} of {}", self.length);
        &mut Arc::make_mut(&mut self.pages[index / PAGE_WORDS])[index % PAGE_WORDS]
    }

    /// Makes a page that of other words.
    pub fn set_page(&mut self, number: usize, from: &Self) {
        self.pages[number] = Arc::clone(&from.pages[number]);
    }

    /// Returns the words of a page. The last one may have fewer.
    pub fn page(&self, number: usize) -> &[u64] {
        &self.pages[number][..PAGE_WORDS.min(self.length - number * PAGE_WORDS)]
    }
}

impl Index<usize> for SharedWords {
    type Output = u64;

    fn index(&self, index: usize) -> &u64 {
        assert!(index < self.length, "word {index} of {}", self.length);
        &self.pages[index / PAGE_WORDS][index % PAGE_WORDS]
    }
}
