//! Reads the body of a request.

use std::ops::Range;

use ashlar_types::Errno;
use zerocopy::FromBytes;

/// A request's body, and how far it was read. Reads past its end give `EIO`: the kernel and this crate then disagree
/// about the protocol, which must not end the mount.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments<'a> {
    body: &'a [u8],
    at: usize,
}

/// A string in a request, and its place in the body.
#[derive(Clone, Debug)]
pub(crate) struct RequestText<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) place: Range<usize>,
}

impl<'a> Arguments<'a> {
    /// Wraps a whole body.
    pub(crate) const fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0 }
    }

    /// Returns the next structure. It is copied, since the body's alignment is unknown.
    pub(crate) fn structure<T: FromBytes>(&mut self) -> Result<T, Errno> {
        let (value, rest) = T::read_from_prefix(self.rest()).map_err(|_| Errno::EIO)?;
        self.at = self.body.len() - rest.len();
        Ok(value)
    }

    /// Returns the next string, without its NUL.
    pub(crate) fn text(&mut self) -> Result<RequestText<'a>, Errno> {
        let length = self.rest().iter().position(|&byte| byte == 0).ok_or(Errno::EIO)?;
        let place = self.at..self.at + length;
        let bytes = self.body.get(place.clone()).ok_or(Errno::EIO)?;
        self.at = place.end + 1;
        Ok(RequestText { bytes, place })
    }

    /// Returns the next `count` bytes.
    pub(crate) fn bytes(&mut self, count: u32) -> Result<&'a [u8], Errno> {
        let bytes = self.rest().get(..count as usize).ok_or(Errno::EIO)?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn rest(&self) -> &'a [u8] {
        self.body.get(self.at..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LinkIn, MkdirIn};
    use super::*;

    #[test]
    fn reads_structures_strings_and_bytes_in_order() {
        let mut body = Vec::new();
        body.extend(0o755_u32.to_ne_bytes());
        body.extend(0o022_u32.to_ne_bytes());
        body.extend(b"name\0\0tail");
        let mut arguments = Arguments::new(&body);
        let mkdir: MkdirIn = arguments.structure().unwrap();
        assert_eq!((mkdir.mode, mkdir.umask), (0o755, 0o022));
        let name = arguments.text().unwrap();
        assert_eq!(name.bytes, b"name");
        assert_eq!(&body[name.place], b"name");
        assert_eq!(arguments.text().unwrap().bytes, b"");
        assert_eq!(arguments.bytes(3).unwrap(), b"tai");
        assert_eq!(arguments.bytes(1).unwrap(), b"l");
    }

    #[test]
    fn missing_bytes_give_eio() {
        assert_eq!(Arguments::new(&[0; 7]).structure::<LinkIn>().unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"no end").text().unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"four").bytes(5).unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"").bytes(u32::MAX).unwrap_err(), Errno::EIO);
    }
}
