//! The canonical dump of the logical tree, as lines of text, and the comparison of two dumps.
//!
//! Two stores to which the same updates were applied have equal dumps, wherever their blocks are. The dump has no
//! block addresses, bitmaps, committed positions or reserved numbers. `docs/format-store.md`, section "Canonical dump",
//! has the lines.

mod compare;
mod error;
mod line;
mod lines;
mod reader;

pub use compare::{DumpComparison, DumpDifference, compare_dumps};
pub use error::DumpError;
pub use line::{DumpSubject, InodePart};
pub use lines::DumpLines;
pub use reader::{DumpHash, DumpSummary};
