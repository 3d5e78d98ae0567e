//! Decoding of arbitrary bytes as update records.
//!
//! Any session may have written the bytes. The decoder must refuse them, or return the one update with that encoding.
#![no_main]

use ashlar_update::Update;
use ashlar_update::acl::Acl;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&kind, body)) = data.split_first() else { return };
    if let Ok(update) = Update::decode(kind, body) {
        assert_eq!(update.kind() as u8, kind);
        assert_eq!(update.encode().parts().concat(), body);
        assert_eq!(update.body_bytes(), body.len() as u64);
        let _ = update.cost();
    }
    if let Some(acl) = Acl::parse(body) {
        assert_eq!(Acl::parse(&acl.to_bytes()), Some(acl));
    }
});
