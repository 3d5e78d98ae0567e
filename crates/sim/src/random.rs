//! A small generator of random numbers: the same seed gives the same numbers for ever.

/// A generator of random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct SimRandom(u64);

impl SimRandom {
    /// Begins at a seed; each purpose has a stream of its own.
    #[must_use]
    pub fn new(seed: u64, purpose: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ purpose.rotate_left(32));
        random.draw();
        random
    }

    /// Draws a number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number below a bound; 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64 }
    }

    /// Draws a number of a range.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// Returns `true` once in so many draws.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// Picks one of a list; `None` if it is empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        from.get(self.below(from.len() as u64) as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_gives_same_numbers() {
        let numbers = |seed, purpose| {
            let mut random = SimRandom::new(seed, purpose);
            [random.draw(), random.below(1000), random.between(5, 9)]
        };
        assert_eq!(numbers(7, 1), numbers(7, 1));
        assert_ne!(numbers(7, 1)[0], numbers(7, 2)[0]);
        assert_ne!(numbers(7, 1)[0], numbers(8, 1)[0]);
        let mut random = SimRandom::new(1, 1);
        assert!((0..1000).all(|_| (5..=9).contains(&random.between(5, 9)) && random.below(3) < 3));
    }
}
