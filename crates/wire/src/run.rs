//! What `ashlar run` tells the library that it has programs load, through their environment.

/// The variable that holds the mounts, as [`encode_mounts`] writes them.
pub const MOUNTS_VARIABLE: &str = "ASHLAR_RUN";
/// The variable that names the directory in which the library keeps what it has found out about programs.
pub const PLANS_VARIABLE: &str = "ASHLAR_PLANS";
/// How many calls of a program the kernel serves before the library opens a session; a default where it is not set.
pub const DEFER_VARIABLE: &str = "ASHLAR_DEFER";

/// Between a mount point and the socket of its daemon, and between mounts.
const FIELD: u8 = 0x1f;
const RECORD: u8 = 0x1e;

/// Mount points with the sockets of their daemons, as text; those are left out in which the text's own separators stand.
#[must_use]
pub fn encode_mounts<'a>(mounts: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let is_plain = |bytes: &[u8]| !bytes.contains(&FIELD) && !bytes.contains(&RECORD);
    let mounts = mounts.into_iter().filter(|(point, socket)| is_plain(point) && is_plain(socket));
    let records: Vec<_> = mounts.map(|(point, socket)| [point, &[FIELD], socket].concat()).collect();
    records.join(&RECORD)
}

/// The mounts in such a text.
pub fn decode_mounts(text: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    text.split(|&byte| byte == RECORD).filter_map(|record| {
        let mut fields = record.split(|&byte| byte == FIELD);
        Some((fields.next()?, fields.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_as_they_were_written() {
        let mounts = [(&b"/mnt/a b"[..], &b"/run/socket"[..]), (b"/mnt/\x1f", b"/left/out"), (b"/mnt/c", b"/other")];
        let text = encode_mounts(mounts);
        assert_eq!(decode_mounts(&text).collect::<Vec<_>>(), [mounts[0], mounts[2]]);
        assert_eq!(decode_mounts(&encode_mounts([])).count(), 0);
        assert_eq!(decode_mounts(b"nonsense").count(), 0);
    }
}
