//! Environment variables by which `ashlar run` configures the library in its programs.

/// The variable that holds the mounts, as [`encode_mounts`] writes them.
pub const MOUNTS_VARIABLE: &str = "ASHLAR_RUN";
/// The variable that names the directory of the library's knowledge about programs.
pub const PLANS_VARIABLE: &str = "ASHLAR_PLANS";
/// The variable with the number of calls that the kernel serves before the library opens a session.
///
/// If it is not set, a default applies.
pub const DEFER_VARIABLE: &str = "ASHLAR_DEFER";
/// The variable with the seconds for which a call waits for a SharedFS that does not answer.
///
/// It applies under `ashlar run`, on a mount and through libashlar. If it is not set, [`PATIENCE_MS`] applies.
pub const PATIENCE_VARIABLE: &str = "ASHLAR_PATIENCE";
/// Milliseconds for which a call waits for a SharedFS that does not answer.
///
/// A restart takes well below a second. Recovery of full logs on a slow disk takes longer, and failing before it ends
/// gains nothing.
pub const PATIENCE_MS: u64 = 120_000;
/// The longest patience, in seconds: a day.
const PATIENCE_SECONDS_MAX: u64 = 86_400;

/// Returns the patience in milliseconds that [`PATIENCE_VARIABLE`] asks for.
#[must_use]
pub fn patience_ms(said: Option<&[u8]>) -> u64 {
    let seconds = said.and_then(|said| std::str::from_utf8(said).ok()?.parse::<u64>().ok());
    seconds.map_or(PATIENCE_MS, |seconds| seconds.clamp(1, PATIENCE_SECONDS_MAX) * 1000)
}

/// The separator between a mount point and the socket of its daemon, and between mounts.
const FIELD: u8 = 0x1f;
const RECORD: u8 = 0x1e;

/// Encodes mount points with the sockets of their daemons as text.
///
/// It leaves out mounts whose paths contain the separator.
#[must_use]
pub fn encode_mounts<'a>(mounts: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let is_plain = |bytes: &[u8]| !bytes.contains(&FIELD) && !bytes.contains(&RECORD);
    let mounts = mounts.into_iter().filter(|(point, socket)| is_plain(point) && is_plain(socket));
    let records: Vec<_> = mounts.map(|(point, socket)| [point, &[FIELD], socket].concat()).collect();
    records.join(&RECORD)
}

/// Decodes the mounts from such a text.
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
    fn patience_is_parsed_as_seconds() {
        let expected = [(None, PATIENCE_MS), (Some("3"), 3000), (Some("0"), 1000), (Some("soon"), PATIENCE_MS)];
        for (said, patience) in expected {
            assert_eq!(patience_ms(said.map(str::as_bytes)), patience, "{said:?}");
        }
        assert_eq!(patience_ms(Some(b"99999999999")), 86_400_000);
    }

    #[test]
    fn mounts_are_decoded_as_encoded() {
        let mounts = [(&b"/mnt/a b"[..], &b"/run/socket"[..]), (b"/mnt/\x1f", b"/left/out"), (b"/mnt/c", b"/other")];
        let text = encode_mounts(mounts);
        assert_eq!(decode_mounts(&text).collect::<Vec<_>>(), [mounts[0], mounts[2]]);
        assert_eq!(decode_mounts(&encode_mounts([])).count(), 0);
        assert_eq!(decode_mounts(b"nonsense").count(), 0);
    }
}
