//! Whether what several processes saw of a file system could have happened one operation after the other.
//!
//! Workers make random operations on few names and few files, and note for each when it began, when it ended, and what
//! it answered. The checker looks for an order that agrees with the clock and in which a small model of a file system
//! gives the same answers (Wing and Gong 1993; Lowe 2017 for remembering where the search has been).
//!
//! An operation takes effect in one step between its begin and its end, but for those that POSIX and Linux make of
//! several: a listing looks at each name at a moment of its own; a name is looked up first, and then the file that it
//! named is asked; a rename that is refused for two names looked at one after the other.

pub mod checker;
pub mod model;
pub mod operation;
pub mod worker;
