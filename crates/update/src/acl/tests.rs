use ashlar_types::{FileKind, InodeId, Timestamp};
use proptest::prelude::*;

use super::*;

type Raw = (u16, u16, u32);

fn list(entries: &[Raw]) -> Vec<u8> {
    let mut out = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&permissions.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}

fn file(uid: u32, gid: u32) -> Inode {
    Inode { uid, gid, ..Inode::new(FileKind::Regular, 0, InodeId::ROOT, Timestamp::default()) }
}

/// A valid list's entries, in order.
fn entries() -> impl Strategy<Value = Vec<Raw>> {
    let named = || prop::collection::btree_map(1u32..5, 0u16..8, 0..4);
    (named(), named(), prop::array::uniform4(0u16..8), any::<bool>()).prop_map(|(users, groups, bits, mask)| {
        let mut all = vec![(TAG_USER_OWNER, bits[0], ID_NONE)];
        all.extend(users.iter().map(|(&id, &bits)| (TAG_USER, bits, id)));
        all.push((TAG_GROUP_OWNER, bits[1], ID_NONE));
        all.extend(groups.iter().map(|(&id, &bits)| (TAG_GROUP, bits, id)));
        if mask || !users.is_empty() || !groups.is_empty() {
            all.push((TAG_MASK, bits[2], ID_NONE));
        }
        all.push((TAG_OTHER, bits[3], ID_NONE));
        all
    })
}

/// `acl(5)`, "Access check algorithm", word for word.
fn is_granted(entries: &[Raw], inode: &Inode, who: &Credentials, wanted: u16) -> bool {
    let one = |tag: u16| entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.1);
    let contains = |permissions: Option<u16>| permissions.is_some_and(|permissions| permissions & wanted == wanted);
    let mask = one(TAG_MASK);
    if who.uid == inode.uid {
        return contains(one(TAG_USER_OWNER));
    }
    if let Some(user) = entries.iter().find(|entry| entry.0 == TAG_USER && entry.2 == who.uid) {
        return contains(Some(user.1)) && contains(mask);
    }
    let ids: Vec<u32> = who.groups.iter().copied().chain([who.gid]).collect();
    let matching: Vec<&Raw> = entries
        .iter()
        .filter(|entry| match entry.0 {
            TAG_GROUP_OWNER => ids.contains(&inode.gid),
            TAG_GROUP => ids.contains(&entry.2),
            _ => false,
        })
        .collect();
    if !matching.is_empty() {
        let any = matching.iter().any(|entry| contains(Some(entry.1)));
        return if mask.is_some() { any && contains(mask) } else { any };
    }
    contains(one(TAG_OTHER))
}

/// The entry that a class of a mode's bits corresponds to, `acl(5)`, "Correspondence between ACL entries and file
/// permission bits".
fn corresponding(entries: &[Raw], shift: u32) -> u16 {
    match shift {
        6 => TAG_USER_OWNER,
        3 if entries.iter().any(|entry| entry.0 == TAG_MASK) => TAG_MASK,
        3 => TAG_GROUP_OWNER,
        _ => TAG_OTHER,
    }
}

proptest! {
    #[test]
    fn access_is_as_the_manual_says(
        entries in entries(),
        uid in 1u32..6,
        gid in 1u32..6,
        groups in prop::collection::vec(1u32..6, 0..3),
        (owner, group) in (1u32..6, 1u32..6),
        wanted in 0u16..8,
    ) {
        let acl = Acl::parse(&list(&entries)).expect("the list is valid");
        let who = Credentials { uid, gid, groups, checked: false };
        let inode = file(owner, group);
        let expected = is_granted(&entries, &inode, &who, wanted);
        prop_assert_eq!(acl.allows(&inode, &who, Access(wanted.into())), expected);
    }

    #[test]
    fn a_mode_changes_the_entries_that_it_corresponds_to(entries in entries(), mode in 0u32..0o10000) {
        let acl = Acl::parse(&list(&entries)).expect("the list is valid");
        let (mut changed, mut limited) = (entries.clone(), entries.clone());
        for shift in [6, 3, 0] {
            let tag = corresponding(&entries, shift);
            let bits = (mode >> shift & 7) as u16;
            changed.iter_mut().filter(|entry| entry.0 == tag).for_each(|entry| entry.1 = bits);
            limited.iter_mut().filter(|entry| entry.0 == tag).for_each(|entry| entry.1 &= bits);
        }
        let after = acl.clone().with_mode(mode);
        prop_assert_eq!(after.to_bytes(), list(&changed));
        prop_assert_eq!(after.mode(), mode & 0o777);
        let (access, inherited) = acl.inherited(mode);
        prop_assert_eq!(access.to_bytes(), list(&limited));
        prop_assert_eq!(access.mode(), inherited & 0o777);
        prop_assert_eq!(inherited & !0o777, mode & !0o777);
        prop_assert_eq!(acl.is_mode_only(), entries.len() == 3);
    }

    /// A list is read in any order, and written in the one that the kernel wants.
    #[test]
    fn any_order_is_read(entries in entries(), shift in any::<prop::sample::Index>()) {
        let mut mixed = entries.clone();
        mixed.rotate_left(shift.index(entries.len()));
        prop_assert_eq!(Acl::parse(&list(&mixed)).map(|acl| acl.to_bytes()), Some(list(&entries)));
        prop_assert_eq!(Acl::is_plain(&list(&mixed)), entries.len() == 3 && mixed == entries);
        prop_assert!(!Acl::is_plain(&list(&mixed)[..shift.index(list(&mixed).len())]));
    }

    /// Bytes that are nearly a list make a sound one or none.
    #[test]
    fn damaged_lists_are_sound_or_none(
        entries in entries(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in 0usize..4,
    ) {
        let mut value = list(&entries);
        for (index, byte) in damage {
            let index = index.index(value.len());
            value[index] = byte;
        }
        value.truncate(value.len() - cut);
        if let Some(acl) = Acl::parse(&value) {
            prop_assert!(acl.mode() <= 0o777);
            prop_assert_eq!(Acl::parse(&acl.to_bytes()), Some(acl));
        }
    }
}

#[test]
fn a_mask_is_needed_where_users_are_named() {
    assert!(Acl::parse(&list(&[(1, 7, ID_NONE), (2, 6, 5), (4, 5, ID_NONE), (32, 0, ID_NONE)])).is_none());
    let full = list(&[(1, 7, ID_NONE), (2, 6, 5), (4, 5, ID_NONE), (16, 4, ID_NONE), (32, 0, ID_NONE)]);
    let acl = Acl::parse(&full).expect("the list is valid");
    assert_eq!(acl.to_bytes(), full);
    assert_eq!(acl.mode(), 0o740);
    assert!(!acl.is_mode_only());
    assert_eq!(acl.clone().with_mode(0o620).mode(), 0o620);
    assert_eq!(acl.inherited(0o666).1, 0o640);
}

#[test]
fn garbage_is_no_list() {
    let (user, group, other) = ((1, 7, ID_NONE), (4, 5, ID_NONE), (32, 0, ID_NONE));
    assert!(Acl::parse(&list(&[user, group, other])).is_some());
    let mut version = list(&[user, group, other]);
    version[0] = 1;
    for value in [
        version,
        Vec::new(),
        list(&[]),
        list(&[group, other]),
        list(&[user, other]),
        list(&[user, group]),
        list(&[(1, 8, ID_NONE), group, other]),
        list(&[(1, 7, 0), user, group, other]),
        list(&[user, group, other, (64, 7, 0)]),
        list(&[user, group, other, (3, 7, 0)]),
        list(&[user, group, other, (0, 7, 0)]),
        list(&[user, group, other, (16, 7, 0), (16, 7, 1)]),
        list(&[user, group, other, (16, 7, 0), (2, 7, 1), (2, 6, 1)]),
        list(&[user, group, other, (16, 7, 0), (2, 7, ID_NONE)]),
        list(&[user, group, other, (8, 7, 1)]),
    ] {
        assert_eq!(Acl::parse(&value), None, "{value:?}");
    }
}
