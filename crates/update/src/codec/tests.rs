use proptest::prelude::*;

use super::*;

/// The fields from which an update of any kind is made.
#[derive(Clone, Debug)]
struct Fields {
    ids: [u64; 4],
    offsets: [u64; 2],
    times: [Timestamp; 3],
    numbers: [u32; 4],
    flags: [bool; 6],
    names: [Vec<u8>; 3],
    values: [Vec<u8>; 3],
    choice: u8,
}

fn time() -> impl Strategy<Value = Timestamp> {
    (any::<i64>(), 0u32..1_000_000_000).prop_map(|(seconds, nanoseconds)| Timestamp { seconds, nanoseconds })
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..=255).prop_map(|mut bytes| {
        for byte in &mut bytes {
            if matches!(byte, 0 | b'/') {
                *byte = b'x';
            }
        }
        if bytes == b"." || bytes == b".." { b"...".to_vec() } else { bytes }
    })
}

prop_compose! {
    fn fields()(
        ids in prop::array::uniform4(1..=u64::MAX),
        offsets in prop::array::uniform2(0..=FILE_SIZE_MAX),
        times in prop::array::uniform3(time()),
        numbers in prop::array::uniform4(any::<u32>()),
        flags in prop::array::uniform6(any::<bool>()),
        names in prop::array::uniform3(name()),
        values in prop::array::uniform3(prop::collection::vec(1u8.., 0..300)),
        choice in any::<u8>(),
    ) -> Fields {
        Fields { ids, offsets, times, numbers, flags, names, values, choice }
    }
}

impl Fields {
    fn create(&self) -> Create<'_> {
        let kinds = [1, 2, 4, 6, 8, 10, 12];
        let kind = FileKind::from_u8(kinds[usize::from(self.choice) % 7]).expect("these are kinds");
        Create {
            inode: InodeId(self.ids[0]),
            parent: InodeId(self.ids[1]),
            name: if self.flags[0] { &self.names[0] } else { b"" },
            kind,
            mode: self.numbers[0] & MODE_PERMISSIONS,
            uid: self.numbers[1],
            gid: self.numbers[2],
            device: self.ids[2],
            at: self.times[0],
            target: if kind == FileKind::Symlink { &self.names[1] } else { b"" },
            acl_access: &self.values[1],
            acl_default: &self.values[2],
        }
    }

    fn set_attributes(&self) -> SetAttributes {
        SetAttributes {
            inode: InodeId(self.ids[0]),
            mode: self.flags[0].then_some(self.numbers[0] & MODE_PERMISSIONS),
            uid: self.flags[1].then_some(self.numbers[1]),
            gid: self.flags[2].then_some(self.numbers[2]),
            accessed: self.flags[3].then_some(self.times[1]),
            modified: self.flags[4].then_some(self.times[2]),
            at: self.times[0],
        }
    }

    fn update(&self, kind: u8) -> Update<'_> {
        let [inode, parent, new_parent, target] = self.ids.map(InodeId);
        let (at, name, release, strip) = (self.times[0], &self.names[0][..], self.flags[0], self.flags[1]);
        let mode = self.flags[2].then_some(self.numbers[0] & MODE_PERMISSIONS);
        let [offset, length] = self.offsets;
        let value = &self.values[0][..];
        match kind {
            1 => Update::Write { inode, offset, at, strip, data: value },
            2 => Update::Create(self.create()),
            3 => Update::Link { inode, parent, name, at },
            4 => Update::Unlink { inode, parent, name, release, at },
            5 => Update::RemoveDirectory { inode, parent, name, release, at },
            6 => {
                let (target, exchange) = (self.flags[3].then_some(target), self.flags[4]);
                let new_name = &self.names[1];
                let (uid, gid, acl_access) = (self.numbers[1], self.numbers[2], &self.values[1][..]);
                let whiteout = Whiteout { inode: InodeId(self.offsets[0].max(1)), uid, gid, acl_access };
                let whiteout = (self.flags[5] && !exchange).then_some(whiteout);
                Update::Rename(Rename {
                    parent,
                    name,
                    inode,
                    new_parent,
                    new_name,
                    target,
                    exchange,
                    whiteout,
                    release,
                    at,
                })
            }
            7 => Update::Resize { inode, size: offset, strip, at },
            8 => {
                let how = Reader(&[self.choice % 7]).allocation().expect("there are seven");
                Update::Allocate { inode, how, offset, length, strip, at }
            }
            9 => Update::SetAttributes(self.set_attributes()),
            10 => Update::SetXattr { inode, name, value, mode, at },
            11 => Update::RemoveXattr { inode, name, mode, at },
            12 => Update::Accessed { inode, at },
            13 => Update::Release { inode },
            14 => Update::Depend { session: SessionId(self.ids[0]), position: LogPosition(self.ids[1]) },
            _ => Update::SetQuota { inode, quota: QuotaId(self.ids[1] >> (64 - QuotaId::BITS)), at },
        }
    }
}

fn bytes(update: &Update<'_>) -> Vec<u8> {
    update.encode().parts().concat()
}

/// Every body that decodes is the encoder's own output for it, and was given with the right length.
fn check_canonical(kind: u8, body: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(update) = Update::decode(kind, body) {
        prop_assert_eq!(update.kind() as u8, kind);
        prop_assert_eq!(bytes(&update), body);
        prop_assert_eq!(update.body_bytes(), body.len() as u64);
        let mut cost = update.cost();
        cost += update.cost();
    }
    Ok(())
}

proptest! {
    #[test]
    fn encoded_updates_are_decoded(fields in fields(), kind in 1u8..=15) {
        let update = fields.update(kind);
        let body = bytes(&update);
        prop_assert_eq!(Update::decode(kind, &body), Ok(update.clone()));
        prop_assert_eq!(update.body_bytes(), body.len() as u64);
        let data = if let Update::Write { data, .. } = &update { data.len() } else { 0 };
        prop_assert_eq!(update.encode().data_offset(), (body.len() - data) as u64);
    }

    #[test]
    fn any_bytes_are_refused_or_canonical(kind in 0u8..20, body in prop::collection::vec(any::<u8>(), 0..120)) {
        check_canonical(kind, &body)?;
    }

    /// Bytes that are nearly an update get further into the decoder.
    #[test]
    fn damaged_updates_are_refused_or_canonical(
        fields in fields(),
        kind in 1u8..=15,
        other in 0u8..20,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in any::<prop::sample::Index>(),
        how in 0..4,
    ) {
        let mut body = bytes(&fields.update(kind));
        for (index, value) in damage {
            let index = index.index(body.len());
            body[index] = value;
        }
        match how {
            0 => body.truncate(cut.index(body.len())),
            1 => body.push(0),
            _ => {}
        }
        check_canonical(if how == 3 { other } else { kind }, &body)?;
    }

    /// Only a write's data may end anywhere.
    #[test]
    fn a_body_of_another_length_is_refused(fields in fields(), kind in 2u8..=15, cut in any::<prop::sample::Index>()) {
        let mut body = bytes(&fields.update(kind));
        let short = &body[..cut.index(body.len())];
        prop_assert!(Update::decode(kind, short).is_err());
        body.push(0);
        prop_assert_eq!(Update::decode(kind, &body), Err(DecodeError::WrongLength));
    }
}

fn unlink(name: &[u8]) -> Update<'_> {
    let at = Timestamp { seconds: -1, nanoseconds: 5 };
    Update::Unlink { inode: InodeId(9), parent: InodeId(1), name, release: true, at }
}

/// The bytes stand on media: this very sequence is what every later release must read.
#[test]
fn the_bytes_are_those_of_the_format() {
    let body = bytes(&unlink(b"ab"));
    assert_eq!(
        body,
        [
            &9u64.to_le_bytes()[..],
            &1u64.to_le_bytes(),
            &(-1i64).to_le_bytes(),
            &5u32.to_le_bytes(),
            &[1],
            &[2, b'a', b'b']
        ]
        .concat()
    );
}

#[test]
fn a_whiteout_stands_behind_the_names() {
    let (parent, inode, new_parent) = (InodeId(1), InodeId(2), InodeId(3));
    let whiteout = Some(Whiteout { inode: InodeId(9), uid: 5, gid: 6, acl_access: b"" });
    let (name, new_name, at) = (&b"a"[..], &b"b"[..], Timestamp::default());
    let (target, exchange, release) = (None, false, false);
    let rename = Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
    let body = bytes(&Update::Rename(rename));
    let plain = bytes(&Update::Rename(Rename { whiteout: None, ..rename }));
    assert_eq!((body[44], plain[44]), (4, 0));
    assert_eq!((&body[..44], &body[45..49]), (&plain[..44], &plain[45..]));
    assert_eq!(body[49..], [9, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0]);
}

#[test]
fn invalid_names_are_refused() {
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
        assert_eq!(Update::decode(4, &bytes(&unlink(name))), Err(DecodeError::BadName), "{name:?}");
    }
    for name in [&b""[..], b"user.\0"] {
        let update = Update::RemoveXattr { inode: InodeId(9), name, mode: None, at: Timestamp::default() };
        assert_eq!(Update::decode(11, &bytes(&update)), Err(DecodeError::BadName), "{name:?}");
    }
}

#[test]
fn values_out_of_their_range_are_refused() {
    let refused = |kind: u8, change: &dyn Fn(&mut Vec<u8>), update: Update<'_>| {
        let mut body = bytes(&update);
        assert!(Update::decode(kind, &body).is_ok(), "{update:?}");
        change(&mut body);
        assert_eq!(Update::decode(kind, &body), Err(DecodeError::OutOfRange), "{update:?}");
    };
    let (inode, at) = (InodeId(9), Timestamp::default());
    let accessed = Update::Accessed { inode, at };
    // The shared area keeps the kind of a quota above these bits.
    refused(15, &|body| body[27] = 1, Update::SetQuota { inode, quota: QuotaId((1 << QuotaId::BITS) - 1), at });
    refused(12, &|body| body[..8].fill(0), accessed.clone());
    refused(12, &|body| body[16..].copy_from_slice(&1_000_000_000u32.to_le_bytes()), accessed);
    let resize = Update::Resize { inode, size: FILE_SIZE_MAX, strip: false, at };
    refused(7, &|body| body[15] = 0x80, resize.clone());
    refused(7, &|body| body[28] = 2, resize);
    let (how, offset, length) = (Allocation::Insert, 4096, 4096);
    refused(8, &|body| body[36] = 7, Update::Allocate { inode, how, offset, length, strip: false, at });
    refused(
        10,
        &|body| body[20..24].copy_from_slice(&0o10000u32.to_le_bytes()),
        Update::SetXattr { inode, name: b"user.a", value: b"", mode: Some(0o777), at },
    );
    let none = SetAttributes { inode, mode: None, uid: None, gid: None, accessed: None, modified: None, at };
    refused(9, &|body| body[20] = 32, Update::SetAttributes(none));
    let rename = Rename {
        parent: inode,
        name: b"a",
        inode,
        new_parent: inode,
        new_name: b"b",
        target: None,
        exchange: false,
        whiteout: None,
        release: false,
        at,
    };
    refused(6, &|body| body[44] = 8, Update::Rename(rename));
    let whiteout = Whiteout { inode, uid: 1, gid: 2, acl_access: b"list" };
    let leaving = Update::Rename(Rename { whiteout: Some(whiteout), ..rename });
    refused(6, &|body| body[44] = 5, leaving.clone());
    refused(6, &|body| body[49..57].fill(0), leaving);
}

#[test]
fn only_a_symbolic_link_has_a_target() {
    let create = |kind, target| {
        Update::Create(Create {
            inode: InodeId(9),
            parent: InodeId(1),
            name: b"a",
            kind,
            mode: 0,
            uid: 0,
            gid: 0,
            device: 0,
            at: Timestamp::default(),
            target,
            acl_access: b"",
            acl_default: b"",
        })
    };
    assert!(Update::decode(2, &bytes(&create(FileKind::Symlink, &[b'x'; SYMLINK_MAX]))).is_ok());
    for (kind, target) in [
        (FileKind::Symlink, &b""[..]),
        (FileKind::Symlink, b"a\0"),
        (FileKind::Symlink, &[b'x'; SYMLINK_MAX + 1]),
        (FileKind::Regular, b"x"),
    ] {
        assert_eq!(Update::decode(2, &bytes(&create(kind, target))), Err(DecodeError::OutOfRange));
    }
}

#[test]
fn a_value_has_a_longest_length() {
    let update =
        |value| Update::SetXattr { inode: InodeId(9), name: b"user.a", value, mode: None, at: Timestamp::default() };
    let value = vec![0; XATTR_VALUE_MAX + 1];
    assert!(Update::decode(10, &bytes(&update(&value[1..]))).is_ok());
    assert_eq!(Update::decode(10, &bytes(&update(&value))), Err(DecodeError::OutOfRange));
    assert_eq!(Update::decode(0, &[]), Err(DecodeError::UnknownKind(0)));
    assert_eq!(Update::decode(16, &[]), Err(DecodeError::UnknownKind(16)));
}
