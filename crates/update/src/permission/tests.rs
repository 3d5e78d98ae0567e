use ashlar_types::{FileKind, InodeId, Timestamp};

use super::*;

const OWNER: u32 = 10;
const GROUP: u32 = 20;

fn inode(kind: FileKind, mode: u32) -> Inode {
    Inode { uid: OWNER, gid: GROUP, ..Inode::new(kind, mode, InodeId::ROOT, Timestamp::default()) }
}

fn user(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
    Credentials { uid, gid, groups: groups.to_vec(), checked: false }
}

/// Only the first class that fits counts, even where a later one would allow more.
#[test]
fn the_first_class_that_fits_decides() {
    let classes = [
        (user(OWNER, GROUP, &[]), 6),
        (user(11, GROUP, &[]), 3),
        (user(11, 21, &[GROUP]), 3),
        (user(11, 21, &[22]), 0),
    ];
    for mode in 0..0o1000 {
        for (who, shift) in &classes {
            for wanted in 0..8 {
                let expected = (mode >> shift) & wanted == wanted;
                assert_eq!(
                    allows(&inode(FileKind::Regular, mode), None, who, Access(wanted)),
                    expected,
                    "{mode:o} {wanted}"
                );
            }
        }
    }
}

#[test]
fn super_user_executes_files_with_any_execute_bit() {
    let root = Credentials::root();
    assert!(allows(&inode(FileKind::Regular, 0), None, &root, Access::READ | Access::WRITE));
    assert!(!allows(&inode(FileKind::Regular, 0o666), None, &root, Access::EXECUTE));
    assert!(allows(&inode(FileKind::Regular, 0o010), None, &root, Access::EXECUTE));
    assert!(allows(&inode(FileKind::Directory, 0), None, &root, Access::EXECUTE));
    // Where the kernel has checked already, nothing is asked again.
    assert!(allows(&inode(FileKind::Regular, 0), None, &Credentials::checked(11, 21), Access::EXECUTE));
}

#[test]
fn a_list_stands_in_for_the_bits() {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, bits, id) in [(1u16, 6u16, u32::MAX), (2, 7, 11), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
    {
        value.extend(tag.to_le_bytes().into_iter().chain(bits.to_le_bytes()).chain(id.to_le_bytes()));
    }
    let acl = Acl::parse(&value).expect("the list is valid");
    let file = inode(FileKind::Regular, 0o640);
    assert!(allows(&file, Some(&acl), &user(11, 21, &[]), Access::READ));
    assert!(!allows(&file, Some(&acl), &user(11, 21, &[]), Access::WRITE));
    assert!(!allows(&file, None, &user(11, 21, &[]), Access::READ));
    assert!(!allows(&file, Some(&acl), &user(12, GROUP, &[]), Access::READ));
    assert!(allows(&file, None, &user(12, GROUP, &[]), Access::READ));
    assert!(allows(&file, Some(&acl), &Credentials::root(), Access::WRITE));
}

#[test]
fn a_sticky_directory_keeps_entries_for_their_owners() {
    let file = Inode { uid: 11, ..inode(FileKind::Regular, 0o666) };
    for (mode, who, stuck) in [
        (0o1777, user(12, GROUP, &[]), true),
        (0o1777, user(11, 21, &[]), false),
        (0o1777, user(OWNER, 21, &[]), false),
        (0o1777, Credentials::root(), false),
        (0o1777, Credentials::checked(12, 21), false),
        (0o777, user(12, GROUP, &[]), false),
    ] {
        assert_eq!(is_stuck(&inode(FileKind::Directory, mode), &file, &who), stuck, "{mode:o} {who:?}");
    }
    assert!(owns(&file, &user(11, 1, &[])) && !owns(&file, &user(12, 1, &[])));
}

#[test]
fn another_users_file_is_linked_only_with_both_accesses() {
    let stranger = user(12, 21, &[]);
    for (kind, mode, may) in [
        (FileKind::Regular, 0o666, true),
        (FileKind::Regular, 0o664, false),
        (FileKind::Regular, 0o662, false),
        (FileKind::Regular, 0o4666, false),
        (FileKind::Regular, 0o2676, false),
        (FileKind::Regular, 0o2666, true),
        (FileKind::Fifo, 0o666, false),
        (FileKind::Symlink, 0o777, false),
    ] {
        let file = inode(kind, mode);
        assert_eq!(may_link(&file, None, &stranger), may, "{kind:?} {mode:o}");
        assert!(may_link(&file, None, &user(OWNER, 21, &[])) && may_link(&file, None, &Credentials::root()));
        let unnamed = Inode { links: 0, ..file };
        assert!(!may_link(&unnamed, None, &stranger) && may_link(&unnamed, None, &user(OWNER, 21, &[])));
    }
}
