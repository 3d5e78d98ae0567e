//! Checks that concurrent answers of a file system fit some sequential order.
//!
//! Workers make random operations on few names and few files. They record for each when it began, when it ended, and
//! its answer. The checker searches for an order that agrees with the clock and in which a small model of a file system
//! gives the same answers (Wing and Gong 1993; Lowe 2017 for remembering visited states).
//!
//! An operation takes effect in one step between its begin and its end. POSIX and Linux make several steps of some:
//! - A listing reads each name at a moment of its own.
//! - A name is resolved first, and then the file behind it is asked.
//! - A rename may be refused because of two names that are resolved one after the other.

pub mod checker;
pub mod model;
pub mod operation;
pub mod worker;
