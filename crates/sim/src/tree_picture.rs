//! All that can be read from a tree, from the store or from the model.

use std::collections::BTreeMap;
use std::sync::Arc;

use ashlar_store::{Store, StoreError, Xattrs};
use ashlar_types::{Contents, Inode, InodeId};
use ashlar_update::model::ModelTree;

/// The most bytes of a file that are compared.
const CONTENT_BYTES_MAX: u64 = 1 << 20;

/// All that is known of an inode, with the numbers of a file's blocks.
///
/// Whether a block that reads as zeros was written or only reserved does not count, as coalescing may turn one into the
/// other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PicturedInode {
    id: InodeId,
    inode: Inode,
    xattrs: Xattrs,
    blocks: Vec<u64>,
    content: Vec<u8>,
}

/// All inodes that can be reached from the root, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PicturedTree(BTreeMap<Vec<u8>, Arc<PicturedInode>>);

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    [path, b"/", name].concat()
}

fn content_bytes(inode: &Inode) -> usize {
    if inode.is_directory() { 0 } else { inode.size.min(CONTENT_BYTES_MAX) as usize }
}

impl PicturedTree {
    /// Reads the tree that the store has applied.
    ///
    /// # Errors
    /// The store's: a block that does not match its checksum, for one.
    pub fn of_store(store: &Store) -> Result<Self, StoreError> {
        let mut tree = Self::default();
        let mut ahead = vec![(Vec::new(), InodeId::ROOT)];
        while let Some((path, id)) = ahead.pop() {
            let inode = store.inode(id)?.ok_or(StoreError::Corrupt("an entry leads nowhere"))?;
            for (_, name, entry) in store.entries(id, 0, usize::MAX)? {
                ahead.push((join(&path, name.as_bytes()), entry.inode));
            }
            let blocks = match store.contents(id)? {
                Contents::Inline(_) => vec![0],
                Contents::Extents(extents) | Contents::Withheld(extents) => extents
                    .iter()
                    .flat_map(|extent| extent.logical_block..extent.logical_block + extent.blocks)
                    .collect(),
            };
            let mut content = vec![0; content_bytes(&inode)];
            store.read(id, 0, &mut content)?;
            let pictured = PicturedInode { id, inode, xattrs: store.xattrs(id)?, blocks, content };
            tree.0.insert(path, Arc::new(pictured));
        }
        Ok(tree)
    }

    /// Reads the model's tree.
    ///
    /// Inodes that have not changed since `before` come from there: every update leaves a time of its own.
    #[must_use]
    pub fn of_model(model: &ModelTree, before: &Self) -> Self {
        let inodes: BTreeMap<InodeId, &Inode> = model.inodes().collect();
        let known: BTreeMap<InodeId, &Arc<PicturedInode>> = before.0.values().map(|known| (known.id, known)).collect();
        let mut tree = Self::default();
        let mut ahead = vec![(Vec::new(), InodeId::ROOT)];
        while let Some((path, id)) = ahead.pop() {
            let inode = inodes[&id].clone();
            for (name, entry) in model.entries(id) {
                ahead.push((join(&path, name), entry.inode));
            }
            let pictured = match known.get(&id).filter(|known| known.inode == inode) {
                Some(known) => Arc::clone(known),
                None => {
                    let mut content = vec![0; content_bytes(&inode)];
                    model.read(id, 0, &mut content);
                    let blocks = model.blocks(id).into_iter().map(|(block, _)| block).collect();
                    Arc::new(PicturedInode { id, inode, xattrs: model.xattrs(id), blocks, content })
                }
            };
            tree.0.insert(path, pictured);
        }
        tree
    }

    /// Returns how many paths differ.
    #[must_use]
    pub fn distance(&self, other: &Self) -> usize {
        let paths = self.0.keys().chain(other.0.keys().filter(|path| !self.0.contains_key(*path)));
        paths.filter(|path| self.0.get(*path) != other.0.get(*path)).count()
    }

    /// Describes the first difference of this tree from the one that is expected.
    #[must_use]
    pub fn difference(&self, expected: &Self) -> Option<String> {
        for path in self.0.keys().chain(expected.0.keys()) {
            let name = String::from_utf8_lossy(path);
            let (found, wanted) = match (self.0.get(path), expected.0.get(path)) {
                (Some(found), Some(wanted)) => (found, wanted),
                (Some(found), None) => return Some(format!("'{name}', inode {}, should not be there", found.id)),
                (None, Some(wanted)) => return Some(format!("'{name}', inode {}, is missing", wanted.id)),
                (None, None) => continue,
            };
            if found == wanted {
                continue;
            }
            let brief = |node: &PicturedInode| {
                let (id, inode, blocks) = (node.id, &node.inode, &node.blocks);
                let xattrs: Vec<_> = node.xattrs.iter().map(|(_, value)| value.len()).collect();
                format!("inode {id}, {inode:?}, attributes of {xattrs:?} bytes, blocks {blocks:?}")
            };
            let at = found.content.iter().zip(&wanted.content).position(|(found, wanted)| found != wanted);
            let bytes = at.map_or_else(String::new, |at| format!("; other bytes from {at} on"));
            return Some(format!("'{name}' is {} instead of {}{bytes}", brief(found), brief(wanted)));
        }
        None
    }
}
