//! Compares a store with the model of a tree.

use ashlar_store::Store;
use ashlar_types::{BLOCK_BYTES, Contents, InodeId, QuotaAmount};
use ashlar_update::model::ModelTree;

/// Compares all that can be read. No inode has a number above `last`.
pub fn compare_trees(store: &Store, model: &ModelTree, last: u64) {
    let mut orphans = store.orphans().unwrap();
    orphans.sort_unstable();
    assert_eq!(orphans, model.orphans());
    let used = store.quotas().into_iter().map(|(key, used, _)| (key, used));
    // Others are limited, and not used.
    let used: Vec<_> = used.filter(|(_, used)| *used != QuotaAmount::default()).collect();
    assert_eq!(used, model.quotas().into_iter().collect::<Vec<_>>());
    for id in (1..=last).map(InodeId) {
        let inode = model.inodes().find(|(found, _)| *found == id).map(|(_, inode)| inode);
        assert_eq!(store.inode(id).unwrap().as_ref(), inode, "inode {id}");
        assert_eq!(store.xattrs(id).unwrap(), model.xattrs(id), "attributes of {id}");
        compare_entries(store, model, id);
        if inode.is_some() {
            compare_content(store, model, id);
        }
    }
}

fn compare_entries(store: &Store, model: &ModelTree, directory: InodeId) {
    let mut expected: Vec<_> =
        model.entries(directory).map(|(name, entry)| (store.name_cookie(name), name.to_vec(), entry)).collect();
    expected.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let (mut found, mut after) = (Vec::new(), 0);
    loop {
        let page = store.entries(directory, after, 2).unwrap();
        let Some(last) = page.last() else { break };
        after = last.0;
        found.extend(page.into_iter().map(|(cookie, name, entry)| (cookie, name.as_bytes().to_vec(), entry)));
    }
    assert_eq!(found, expected, "entries of {directory}");
    for (_, name, entry) in &expected {
        assert_eq!(store.entry(directory, name).unwrap(), Some(*entry));
        assert_eq!(
            store.xattr(directory, name).unwrap().is_some(),
            model.xattrs(directory).iter().any(|x| x.0 == *name)
        );
    }
}

fn compare_content(store: &Store, model: &ModelTree, id: InodeId) {
    let expected = model.blocks(id);
    let found: Vec<(u64, bool)> = match store.contents(id).unwrap() {
        Contents::Inline(_) => vec![(0, true)],
        Contents::Extents(extents) | Contents::Withheld(extents) => extents
            .iter()
            .flat_map(|extent| {
                let logical = extent.logical_block..extent.logical_block + extent.blocks;
                logical.map(move |block| (block, extent.address.is_some()))
            })
            .collect(),
    };
    assert_eq!(found, expected, "blocks of {id}");
    let starts = expected.iter().map(|(block, _)| block * BLOCK_BYTES).chain([0, 500, (1 << 62) - 1]);
    for start in starts.take(80) {
        let (mut got, mut wanted) = (vec![1; 6000], vec![2; 6000]);
        let (length, wanted_length) = (store.read(id, start, &mut got).unwrap(), model.read(id, start, &mut wanted));
        assert_eq!(length, wanted_length);
        assert!(got[..length] == wanted[..length], "content of {id} at {start}");
    }
}
