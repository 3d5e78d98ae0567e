//! Parses the kernel's table of mounts: the text of `/proc/PID/mountinfo`.

/// The type of file system under which Ashlar is mounted.
pub const MOUNT_TYPE: &str = "fuse.ashlar";

/// The kernel's switch for FUSE over io_uring, from Linux 6.14 on: `Y` or `N`.
pub const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The beginning of the source of such a mount; its arena's directory follows. It has no colon: programs take a source
/// with one for another machine's (`df -l`, `du`).
pub const MOUNT_SOURCE: &str = "ashlar@";

/// A line: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine<'a> {
    /// `MAJOR:MINOR` of the device number that its files show.
    pub device: &'a [u8],
    /// The directory where it is mounted.
    pub point: Vec<u8>,
    /// The mount's options, with commas between them.
    pub options: &'a [u8],
    /// The type of the file system.
    pub kind: &'a [u8],
    /// The mounted thing, as its type names it.
    pub source: Vec<u8>,
}

impl<'a> MountLine<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.split(|&byte| byte == b' ');
        let device = words.nth(2)?;
        let point = unescape(words.nth(1)?);
        let options = words.next()?;
        // Optional fields end with a hyphen; the type follows it.
        let mut remainder = words.skip_while(|word| *word != b"-").skip(1);
        let kind = remainder.next()?;
        Some(Self { device, point, options, kind, source: unescape(remainder.next().unwrap_or_default()) })
    }

    /// Whether an Ashlar is mounted there.
    #[must_use]
    pub fn is_ashlar(&self) -> bool {
        self.kind == MOUNT_TYPE.as_bytes()
    }

    /// Returns the directory of the arena that is mounted there, if it is an Ashlar.
    #[must_use]
    pub fn arena(&self) -> Option<&[u8]> {
        self.source.strip_prefix(MOUNT_SOURCE.as_bytes()).filter(|_| self.is_ashlar())
    }

    /// Whether nothing can be changed through it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.options.split(|&byte| byte == b',').any(|option| option == b"ro")
    }
}

/// Returns the lines of a table, the mount made last first: it hides the mounts below it.
pub fn mount_lines(table: &[u8]) -> impl Iterator<Item = MountLine<'_>> {
    table.rsplit(|&byte| byte == b'\n').filter_map(MountLine::parse)
}

/// Returns the topmost mount on a path.
#[must_use]
pub fn topmost_mount<'a>(table: &'a [u8], path: &[u8]) -> Option<MountLine<'a>> {
    mount_lines(table).find(|line| line.point == path)
}

/// Replaces escapes: blanks and backslashes are written as a backslash and three octal digits.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, remainder)) = rest.split_first() {
        let digits = remainder.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &remainder[3..] } else { remainder };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_lines_are_parsed() {
        let table = br"36 35 98:0 / /mnt\040a ro,noatime master:1 shared:2 - fuse.ashlar x\134y rw";
        let line = mount_lines(table).next().expect("a line");
        assert_eq!((line.device, &line.point[..]), (&b"98:0"[..], &b"/mnt a"[..]));
        assert_eq!(
            (line.options, line.kind, &line.source[..]),
            (&b"ro,noatime"[..], &b"fuse.ashlar"[..], &br"x\y"[..])
        );
        assert!(line.is_ashlar());
        assert!(line.is_read_only());
        assert_eq!(line.arena(), None, "the source names none");
        let table = br"36 35 0:51 / /mnt rw,nosuid - fuse.ashlar ashlar@/var/lib/a\040b rw";
        let line = mount_lines(table).next().expect("a line");
        assert_eq!((line.arena(), line.is_read_only()), (Some(&b"/var/lib/a b"[..]), false));
        assert_eq!(mount_lines(b"36 35\ngarbage\n\n1 2 3").count(), 0);
    }

    #[test]
    fn topmost_mount_of_a_path_is_found() {
        let table = b"41 22 0:51 / /mnt/a rw - fuse.ashlar ashlar rw\n42 41 0:52 / /mnt/a rw - tmpfs tmpfs rw\n";
        assert_eq!(topmost_mount(table, b"/mnt/a").map(|line| line.kind), Some(&b"tmpfs"[..]));
        assert_eq!(topmost_mount(table, b"/mnt"), None);
    }
}
