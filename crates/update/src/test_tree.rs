//! A small tree.
