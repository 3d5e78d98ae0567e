//! Tables with aligned columns.

/// Lays out `rows` below `header`. Columns are as wide as their widest cell, with two spaces between; the last column
/// is not padded. A column whose cells are all numbers, sizes or shares, or `-` for none, is aligned to the right. An
/// address is no number.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let is_number = |column: usize| {
        let mut cells = rows.iter().filter_map(|row| row.get(column)).peekable();
        let is_numeric = |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit()) && !cell.contains([':', '(']);
        cells.peek().is_some() && cells.all(|cell| cell == "-" || is_numeric(cell))
    };
    let columns: Vec<_> = (0..header.len()).map(|column| (width(column), is_number(column))).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (cell, (width, right)) in cells.zip(&columns) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            text += &if *right { format!("{pad}{cell}  ") } else { format!("{cell}{pad}  ") };
        }
        text.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut header.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Formats a number with separated thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_to_the_right_and_words_to_the_left() {
        let rows = vec![vec!["7".into(), "mount".into()], vec!["12,000".into(), "a".into()]];
        assert_eq!(table(&["N", "KIND"], &rows), "     N  KIND\n     7  mount\n12,000  a\n");
    }

    #[test]
    fn what_there_is_no_number_of_stands_among_numbers() {
        let rows = vec![vec!["120".into(), "a".into()], vec!["-".into(), "b".into()]];
        assert_eq!(table(&["NUMBER", "KIND"], &rows), "NUMBER  KIND\n   120  a\n     -  b\n");
    }

    #[test]
    fn addresses_stand_to_the_left() {
        let rows =
            vec![vec!["0 (this)".into(), "10.0.0.1:1".into(), "a".into()], vec!["1".into(), "b:1".into(), "b".into()]];
        assert_eq!(
            table(&["N", "AT", "C"], &rows),
            "N         AT          C\n0 (this)  10.0.0.1:1  a\n1         b:1         b\n"
        );
    }

    #[test]
    fn thousands_are_kept_apart() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
