//! Text for people: sizes, tables and progress.

pub mod progress;
pub mod size;
pub mod table;
