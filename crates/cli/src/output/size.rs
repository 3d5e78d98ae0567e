//! Sizes as people write and read them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A number of bytes. Written with a unit (`512M`, `4G`, `1.5TiB`); units are powers of 1024, as for mkfs and truncate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// A limit of space: a size, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceLimit(pub Option<Size>);

impl FromStr for SpaceLimit {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|size| Self(Some(size))) }
    }
}

/// A limit of files: a number, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilesLimit(pub Option<u64>);

impl FromStr for FilesLimit {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|files| Self(Some(files))) }
    }
}

/// Why a word is no size.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("write a size as a number and a unit: 512M, 4G, 1.5T")]
pub struct SizeError;

const UNITS: [(&str, u32); 6] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40), ("P", 50)];

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim().to_ascii_uppercase();
        let unit = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(&unit);
        let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(SizeError)?;
        // Whole numbers stay exact; only a fraction goes through floating point.
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(Self).ok_or(SizeError);
        }
        let number: f64 = number.parse().map_err(|_| SizeError)?;
        let bytes = number * (1u64 << shift) as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(Self(bytes as u64)) } else { Err(SizeError) }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, shift) = UNITS.iter().rev().find(|(_, shift)| self.0 >> shift > 0).unwrap_or(&UNITS[0]);
        if *shift == 0 {
            return write!(f, "{} B", self.0);
        }
        write!(f, "{:.1} {name}iB", self.0 as f64 / (1u64 << shift) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("4g", 4 << 30),
            ("4GiB", 4 << 30),
            ("1.5K", 1536),
            ("2TB", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "G", "4X", "-1", "1..5G", "99999999999T", "4 GG"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_unit() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB")] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
