//! Reading a request's body.
use ashlar_types::Errno;
use zerocopy::FromBytes;

/// The part of a request's body that was not read yet. Bytes that are not there give `EIO`: the kernel and this crate
/// then disagree about the protocol, which is nobody's fault but must not take the mount down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments<'a>(&'a [u8]);

impl<'a> Arguments<'a> {
    /// All of a body.
    pub(crate) const fn new(body: &'a [u8]) -> Self {
        Self(body)
    }

    /// The next structure. It's copied, since nothing promises its alignment.
    pub(crate) fn structure<T: FromBytes>(&mut self) -> Result<T, Errno> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Errno::EIO)?;
        self.0 = rest;
        Ok(value)
    }

    /// The next string, without its NUL.
    pub(crate) fn string(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|&byte| byte == 0).ok_or(Errno::EIO)?;
        let (name, rest) = self.0.split_at_checked(end).ok_or(Errno::EIO)?;
        self.0 = rest.get(1..).unwrap_or_default();
        Ok(name)
    }

    /// The next `count` bytes.
    pub(crate) fn bytes(&mut self, count: u32) -> Result<&'a [u8], Errno> {
        let (bytes, rest) = self.0.split_at_checked(count as usize).ok_or(Errno::EIO)?;
        self.0 = rest;
        Ok(bytes)
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
        assert_eq!(arguments.string().unwrap(), b"name");
        assert_eq!(arguments.string().unwrap(), b"");
        assert_eq!(arguments.bytes(3).unwrap(), b"tai");
        assert_eq!(arguments.bytes(1).unwrap(), b"l");
    }

    #[test]
    fn what_is_not_there_is_an_error_and_not_a_panic() {
        assert_eq!(Arguments::new(&[0; 7]).structure::<LinkIn>().unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"no end").string().unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"four").bytes(5).unwrap_err(), Errno::EIO);
        assert_eq!(Arguments::new(b"").bytes(u32::MAX).unwrap_err(), Errno::EIO);
    }
}
