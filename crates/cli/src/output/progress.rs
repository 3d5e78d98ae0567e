//! Progress of long work, on standard error, if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Makes a spinner for work of unknown length. It shows nothing if standard error is no terminal.
pub fn spinner(what: &str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// Makes a bar for work of `total` steps.
pub fn bar(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:32}] {percent} % ({eta} left)") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
