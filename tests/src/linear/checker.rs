//! The search for an order.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::model::{Model, Picture, Progress};
use super::operation::{Event, Operation};

/// The most states that a search visits before it gives up. Rounds are so short that thousands are many.
const STATES_MAX: usize = 4_000_000;

/// The operations of one worker, in its order.
pub type History = Vec<Event>;

/// A point of a search: how many operations of each worker are done, how far the next ones are, and the state.
#[derive(Clone, Debug, Hash)]
struct Point {
    next: Vec<usize>,
    progress: Vec<Progress>,
    model: Model,
}

/// Searches for an order of all operations that agrees with the clock, gives the recorded answers, and ends in a state
/// that looks like `end`. Returns how many states it visited.
///
/// # Errors
/// The operations that fit no order, in words for people.
pub fn check(histories: &[History], end: &Picture) -> Result<usize, String> {
    let start = Point {
        next: vec![0; histories.len()],
        progress: vec![Progress::default(); histories.len()],
        model: Model::default(),
    };
    let mut seen = HashSet::from([hash(&start)]);
    let mut furthest = start.clone();
    let mut open = vec![start];
    while let Some(point) = open.pop() {
        if point.next.iter().zip(histories).all(|(next, history)| *next == history.len()) {
            if point.model.picture() == *end {
                return Ok(seen.len());
            }
            furthest = point;
            continue;
        }
        if point.next.iter().sum::<usize>() > furthest.next.iter().sum() {
            furthest.clone_from(&point);
        }
        if seen.len() > STATES_MAX {
            return Err(format!("undecided after {STATES_MAX} states\n{}", explain(histories, &furthest, end)));
        }
        let mut steps = steps(histories, &point);
        // The operation that returned first is tried first: it most likely took effect first.
        steps.reverse();
        open.extend(steps.into_iter().filter(|step| seen.insert(hash(step))));
    }
    Err(explain(histories, &furthest, end))
}

fn hash(point: &Point) -> u64 {
    let mut hasher = DefaultHasher::new();
    point.hash(&mut hasher);
    hasher.finish()
}

/// The points after one step of one worker. A step may come next if no unfinished operation had returned before its own
/// was called.
fn steps(histories: &[History], point: &Point) -> Vec<Point> {
    let mut ready: Vec<(usize, &Event)> = histories
        .iter()
        .enumerate()
        .filter_map(|(worker, history)| Some((worker, history.get(point.next[worker])?)))
        .collect();
    let first_return = ready.iter().map(|(_, event)| event.returned).min().unwrap_or(0);
    ready.retain(|(_, event)| event.called <= first_return);
    ready.sort_by_key(|(_, event)| event.returned);
    let mut steps = Vec::new();
    for (worker, event) in ready {
        let results = match &event.operation {
            Operation::Create(place) => {
                point.model.step_create(*place, &event.answer).map(|model| (model, None)).into_iter().collect()
            }
            operation => point.model.step(operation, &event.answer, point.progress[worker]),
        };
        for (model, progress) in results {
            let mut step = Point { model, ..point.clone() };
            step.progress[worker] = progress.unwrap_or_default();
            step.next[worker] += usize::from(progress.is_none());
            steps.push(step);
        }
    }
    steps
}

/// A round without an order, for people: every operation, with those of the longest order found marked.
fn explain(histories: &[History], furthest: &Point, end: &Picture) -> String {
    let mut events: Vec<(usize, usize, &Event)> = histories
        .iter()
        .enumerate()
        .flat_map(|(worker, history)| history.iter().enumerate().map(move |(number, event)| (worker, number, event)))
        .collect();
    events.sort_by_key(|(_, _, event)| event.called);
    let begin = events.first().map_or(0, |(_, _, event)| event.called);
    let mut text = String::from("no order of these operations gives these answers:\n");
    for (worker, number, event) in events {
        let mark = if number < furthest.next[worker] { ' ' } else { '?' };
        text += &format!(
            "{mark} worker {worker} {:>9.3} – {:>9.3} ms  {:?} → {:?}\n",
            (event.called - begin) as f64 / 1e6,
            (event.returned - begin) as f64 / 1e6,
            event.operation,
            event.answer
        );
    }
    text + &format!(
        "the longest order (without '?') ends in {:?}\nat the end there was {end:?}\n",
        furthest.model.picture()
    )
}

#[cfg(test)]
mod tests;
