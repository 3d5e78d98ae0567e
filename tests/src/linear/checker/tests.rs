//! Histories that have an order, and canaries: histories with a planted fault, which have none.

use super::super::model::Seen;
use super::super::operation::{Answer, EntryName, Move};
use super::*;

const AC: EntryName = EntryName(1, 0);
const BC: EntryName = EntryName(2, 0);

fn event(called: u64, returned: u64, operation: Operation, answer: Answer) -> Event {
    Event { called, returned, operation, answer }
}

/// One worker's operations, each from its time to ten later.
fn history(events: Vec<(u64, Operation, Answer)>) -> History {
    events.into_iter().map(|(at, operation, answer)| event(at, at + 10, operation, answer)).collect()
}

/// The base picture with one more file at `path`.
fn with_file(path: &str, content: &str) -> Picture {
    let mut picture = Model::default().picture();
    picture.insert(path.to_owned(), Seen::File(50, 1, content.to_owned()));
    picture
}

fn made() -> (u64, Operation, Answer) {
    (0, Operation::Create(AC), Answer::File(50))
}

fn write(at: u64, text: &str) -> (u64, Operation, Answer) {
    (at, Operation::Write(50, 0, text.to_owned()), Answer::Done)
}

fn read(at: u64, text: &str) -> (u64, Operation, Answer) {
    (at, Operation::Read(50, 0, 10), Answer::Text(text.to_owned()))
}

#[test]
fn stale_read_has_no_order() {
    let writer = history(vec![made(), write(20, "old"), write(40, "new")]);
    let reader = |text: &str| history(vec![read(60, text)]);
    let end = with_file("a/a", "new");
    assert!(check(&[writer.clone(), reader("new")], &end).is_ok());
    let error = check(&[writer.clone(), reader("old")], &end).expect_err("a stale read");
    assert!(error.contains("? worker 1"), "{error}");
    // While the write is under way, both texts are right.
    for text in ["old", "new"] {
        assert!(check(&[writer.clone(), history(vec![read(45, text)])], &end).is_ok(), "{text}");
    }
    assert!(check(&[writer.clone(), history(vec![read(45, "new"), read(60, "old")])], &end).is_err(), "time goes back");
    assert!(check(&[writer, reader("new")], &with_file("a/a", "old")).is_err(), "another end");
}

#[test]
fn lost_rename_has_no_order() {
    let rename = (20, Operation::Rename(AC, BC, Move::Replace), Answer::Done);
    let mover = history(vec![made(), rename]);
    let stat = |place, answer| history(vec![(40, Operation::Stat(place), answer)]);
    let here = Answer::Attributes(50, 0, 1);
    let end = with_file("b/a", "");
    assert!(check(&[mover.clone(), stat(BC, here.clone())], &end).is_ok());
    assert!(check(&[mover.clone(), stat(AC, Answer::Error(2))], &end).is_ok());
    assert!(check(&[mover.clone(), stat(AC, here)], &end).is_err(), "the old name is still there");
    assert!(check(&[mover.clone(), stat(BC, Answer::Error(2))], &end).is_err(), "the new name is not there");
    assert!(check(&[mover], &with_file("a/a", "")).is_err(), "it was undone");
}

#[test]
fn second_create_or_rename_has_no_order() {
    let create = |file| event(0, 10, Operation::Create(AC), Answer::File(file));
    let refused = event(0, 10, Operation::Create(AC), Answer::Error(17));
    let end = with_file("a/a", "");
    assert!(check(&[vec![create(50)], vec![refused]], &end).is_ok());
    assert!(check(&[vec![create(50)], vec![create(51)]], &end).is_err());
    let moved = |name| event(20, 30, Operation::Rename(AC, EntryName(2, name), Move::Replace), Answer::Done);
    let end = with_file("b/a", "");
    assert!(check(&[vec![create(50), moved(0)], vec![moved(1)]], &end).is_err(), "moved to two places");
}

#[test]
fn directory_cycle_has_no_order() {
    // If "a" moves into "b" and "b" into "a" at once, one of the two must be refused.
    let one = |answer| vec![event(0, 10, Operation::Rename(EntryName(0, 0), BC, Move::Replace), answer)];
    let two = |answer| vec![event(0, 10, Operation::Rename(EntryName(0, 1), AC, Move::Replace), answer)];
    let end = Picture::from(["b", "b/a", "b/a/c"].map(|path| (path.to_owned(), Seen::Directory)));
    assert!(check(&[one(Answer::Done), two(Answer::Error(22))], &end).is_ok());
    assert!(check(&[one(Answer::Done), two(Answer::Done)], &end).is_err());
}

#[test]
fn listing_without_lasting_name_has_no_order() {
    let list = |names| vec![event(5, 60, Operation::List(0), Answer::Names(names))];
    let mover = vec![event(20, 30, Operation::Rename(EntryName(0, 0), EntryName(0, 2), Move::Replace), Answer::Done)];
    let end = Picture::from(["b", "c", "c/c"].map(|path| (path.to_owned(), Seen::Directory)));
    for names in [0b011, 0b110, 0b010, 0b111] {
        assert!(check(&[mover.clone(), list(names)], &end).is_ok(), "{names:b}: each name at a moment of its own");
    }
    assert!(check(&[mover.clone(), list(0b101)], &end).is_err(), "'b' was there throughout");
    let late = vec![event(40, 60, Operation::List(0), Answer::Names(0b011))];
    assert!(check(&[mover, late], &end).is_err(), "a stale listing");
}

#[test]
fn removed_open_file_keeps_content() {
    let holder = |text: &str| history(vec![made(), write(20, "kept"), read(60, text)]);
    let remover = |answer| history(vec![(40, Operation::Unlink(AC), answer)]);
    let end = Model::default().picture();
    assert!(check(&[holder("kept"), remover(Answer::Done)], &end).is_ok());
    assert!(check(&[holder(""), remover(Answer::Done)], &end).is_err(), "its content is gone");
    let twice = history(vec![(40, Operation::Unlink(AC), Answer::Done), (60, Operation::Unlink(AC), Answer::Done)]);
    assert!(check(&[holder("kept"), twice], &end).is_err(), "removed twice");
}
