//! Acts that a node asks of its shell.
//!
//! Effects are kept until the shell polls them: before it lets another thread have the node, or sleeps. An effect that
//! is asked for twice is performed once.

/// An act that the shell performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeEffect {
    /// Advance the pending requests that wait for grants.
    WakeGrants,
    /// Advance the pending requests that wait for locks.
    WakeLocks,
    /// Advance the pending requests that wait for a digest, a commit or the end of a session.
    WakeDigests,
    /// Check all logs now.
    Digest,
    /// Begin a commit.
    Commit,
    /// Send the replica what is new in the journal.
    Replicate,
}

impl NodeEffect {
    const ALL: [Self; 6] =
        [Self::WakeGrants, Self::WakeLocks, Self::WakeDigests, Self::Digest, Self::Commit, Self::Replicate];
}

/// The effects that the shell has not polled yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingEffects(u8);

impl PendingEffects {
    /// Adds an effect.
    pub fn push(&mut self, effect: NodeEffect) {
        self.0 |= 1 << effect as u8;
    }

    /// Takes back an effect, which the shell performs in another way.
    pub fn take(&mut self, effect: NodeEffect) {
        self.0 &= !(1 << effect as u8);
    }

    /// Takes an effect, if there is one.
    pub fn poll(&mut self) -> Option<NodeEffect> {
        let effect = NodeEffect::ALL.into_iter().find(|effect| self.0 & 1 << *effect as u8 != 0)?;
        self.0 &= !(1 << effect as u8);
        Some(effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effect_asked_twice_is_polled_once() {
        let mut effects = PendingEffects::default();
        assert_eq!(effects.poll(), None);
        [NodeEffect::Commit, NodeEffect::WakeGrants, NodeEffect::Commit].into_iter().for_each(|e| effects.push(e));
        assert_eq!(
            [effects.poll(), effects.poll(), effects.poll()],
            [Some(NodeEffect::WakeGrants), Some(NodeEffect::Commit), None]
        );
    }
}
