//! How the demo tells its stories.

use std::time::Instant;

/// The width of the clock before each sentence.
const MARGIN: &str = "            ";

/// The clock of a story.
pub struct Story(Instant);

impl Story {
    /// Begins a story with its title.
    pub fn begin(title: &str) -> Self {
        println!("{title}\n");
        Self(Instant::now())
    }

    /// Prints a sentence with the time.
    pub fn say(&self, words: &str) {
        println!("[{:5.1} s] {words}", self.0.elapsed().as_secs_f64());
    }

    /// Prints a command as a user would type it.
    pub fn show(&self, command: &str) {
        self.say(&format!("$ {command}"));
    }

    /// Prints lines that belong to the last sentence.
    pub fn add(&self, lines: &str) {
        lines.lines().for_each(|line| println!("{MARGIN}{line}"));
    }
}
