//! Requests that can't be answered at once.
//!
//! Each is a row of a table, under a ticket. The shell advances a row when it begins, when an effect or its time says
//! so, and as long as the row can go on. A row never waits in here.

mod digests;
mod ends;
mod grants;
mod locks;
pub mod progress;
pub mod request;
pub mod round;
mod space;
mod steps;
pub mod table;

pub use digests::FIRST_RANGE;
pub use request::{GatedReply, NodeAnswer, NodeRequest, RequestTerms, RequestTicket};
