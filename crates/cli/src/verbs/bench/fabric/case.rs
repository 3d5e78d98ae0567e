//! The cases of `ashlar bench fabric`, and the contenders.

use std::io;
use std::time::Duration;

use serde::Serialize;

/// A peer that has not answered for so long is gone.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A way for bytes to reach another process and be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// A plain TCP socket with blocking reads and writes: the least that a link over TCP takes.
    Socket,
    /// The fabric over TCP.
    Fabric,
    /// The fabric over TCP with TLS.
    FabricTls,
    /// The floor of an `fsync` over two nodes: futex, plain socket, memory, and back.
    Nodes,
    /// Its part in this node: the futex there and back.
    Futex,
}

/// The carriers of messages.
pub const CARRIERS: [Carrier; 3] = [Carrier::Socket, Carrier::Fabric, Carrier::FabricTls];
/// The paths of an `fsync`.
pub const FSYNC_PATHS: [Carrier; 2] = [Carrier::Nodes, Carrier::Futex];

impl Carrier {
    /// Returns its name, for people and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Fabric => "fabric",
            Self::FabricTls => "fabric-tls",
            Self::Nodes => "nodes",
            Self::Futex => "futex",
        }
    }
}

/// Operations that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricCase {
    /// A message, and its echo.
    RoundTrip {
        /// The message's length.
        bytes: usize,
    },
    /// Messages in one direction, until the peer has all of them.
    Stream {
        /// The length of each.
        bytes: usize,
    },
    /// The floor of an `fsync` over two nodes.
    Fsync {
        /// The length of the data.
        bytes: usize,
    },
}

impl FabricCase {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 7] = [
        Self::RoundTrip { bytes: 64 },
        Self::RoundTrip { bytes: 4 << 10 },
        Self::RoundTrip { bytes: 64 << 10 },
        Self::Stream { bytes: 1 << 20 },
        Self::Fsync { bytes: 128 },
        Self::Fsync { bytes: 4 << 10 },
        Self::Fsync { bytes: 64 << 10 },
    ];

    /// Returns the length of a message, or of the data.
    pub const fn bytes(self) -> usize {
        match self {
            Self::RoundTrip { bytes } | Self::Stream { bytes } | Self::Fsync { bytes } => bytes,
        }
    }

    /// Returns how many operations a turn has: all turns of a round take a few seconds together.
    pub const fn count(self) -> usize {
        match self {
            Self::Stream { .. } => 256,
            _ if self.bytes() > 4 << 10 => 1000,
            _ => 3000,
        }
    }

    /// Returns its name.
    pub fn name(self) -> String {
        match self {
            Self::RoundTrip { .. } => format!("round trip {}", self.size_name()),
            Self::Stream { .. } => format!("stream {}", self.size_name()),
            Self::Fsync { .. } => format!("fsync {}", self.size_name()),
        }
    }

    /// Returns the length for people.
    pub fn size_name(self) -> String {
        match self.bytes() {
            bytes @ ..1024 => format!("{bytes} B"),
            bytes @ ..0x10_0000 => format!("{} KB", bytes >> 10),
            bytes => format!("{} MB", bytes >> 20),
        }
    }

    /// Returns the contenders that it measures.
    pub const fn carriers(self) -> &'static [Carrier] {
        match self {
            Self::RoundTrip { .. } | Self::Stream { .. } => &CARRIERS,
            Self::Fsync { .. } => &FSYNC_PATHS,
        }
    }
}

/// The messages of a turn, as this process announces them to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnPlan {
    /// Whether the peer answers after the last message alone, with one byte. Otherwise it echoes each message.
    pub is_stream: bool,
    /// The length of each message.
    pub length: u32,
    /// How many there are.
    pub count: u32,
}

/// Bytes of a [`TurnPlan`].
pub const PLAN_BYTES: usize = 12;
/// The longest message.
pub const LENGTH_MAX: u32 = 1 << 20;

impl TurnPlan {
    /// Encodes it.
    pub fn to_bytes(self) -> [u8; PLAN_BYTES] {
        let mut bytes = [0; PLAN_BYTES];
        bytes[..4].copy_from_slice(&u32::from(self.is_stream).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    /// Decodes it.
    ///
    /// # Errors
    /// The bytes are none.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        let (words, []) = bytes.as_chunks::<4>() else { return Err(io::ErrorKind::InvalidData.into()) };
        match *words {
            [is_stream, length, count] if u32::from_le_bytes(length) <= LENGTH_MAX => Ok(Self {
                is_stream: u32::from_le_bytes(is_stream) != 0,
                length: u32::from_le_bytes(length),
                count: u32::from_le_bytes(count),
            }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// This process's end of a connection to the peer.
pub trait CarrierEnd {
    /// Announces the messages of a turn.
    ///
    /// # Errors
    /// The connection's.
    fn begin_turn(&mut self, plan: TurnPlan) -> io::Result<()>;

    /// Sends a message, and waits for its echo.
    ///
    /// # Errors
    /// The connection's.
    fn exchange(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Sends a message so often, and waits until the peer has all of them.
    ///
    /// # Errors
    /// The connection's.
    fn stream(&mut self, bytes: &[u8], count: usize) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_survives_encoding_and_long_one_is_refused() {
        let plan = TurnPlan { is_stream: true, length: 4096, count: 7 };
        assert_eq!(TurnPlan::from_bytes(&plan.to_bytes()).expect("decoded"), plan);
        let long = TurnPlan { length: LENGTH_MAX + 1, ..plan };
        assert!(TurnPlan::from_bytes(&long.to_bytes()).is_err());
        assert!(TurnPlan::from_bytes(&plan.to_bytes()[1..]).is_err());
    }

    #[test]
    fn cases_have_distinct_names() {
        let names: std::collections::BTreeSet<_> = FabricCase::ALL.iter().map(|case| case.name()).collect();
        assert_eq!(names.len(), FabricCase::ALL.len());
        assert!(names.contains("round trip 64 KB") && names.contains("stream 1 MB"), "{names:?}");
    }
}
