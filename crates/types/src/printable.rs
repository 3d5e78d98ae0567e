//! Text of others, made fit to print.

use std::borrow::Cow;

/// Returns a text without characters that change what a terminal or a log shows around it.
///
/// A process chooses its own name, and an administrator reads it. Control characters move the cursor, set titles or
/// begin lines; some format characters turn the order of the text around them.
#[must_use]
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_control) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_control(letter) {
            escaped.extend(letter.escape_default());
        } else {
            escaped.push(letter);
        }
    }
    Cow::Owned(escaped)
}

/// Whether a character is a control character, ends a line, or sets the direction of the text around it.
fn is_control(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_others_kept() {
        assert!(matches!(escape_controls("python3 é 文"), Cow::Borrowed("python3 é 文")));
        assert_eq!(escape_controls("vim\x1b]0;TITLE\x07\n  99"), r"vim\u{1b}]0;TITLE\u{7}\n  99");
        assert_eq!(escape_controls("a\u{9b}31m\u{202e}b"), r"a\u{9b}31m\u{202e}b", "C1 and direction");
    }
}
