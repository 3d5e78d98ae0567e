//! The content of a tree, read from the store or from its model.

use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_store::{Store, StoreError, Xattrs};
use ashlar_types::{Contents, Inode, InodeId};
use ashlar_update::model::ModelTree;

/// All that is known of an inode, with the numbers of a file's blocks.
///
/// Whether a block that reads as zeros was written or only reserved does not count, as coalescing may turn one into the
/// other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeNode {
    id: InodeId,
    inode: Inode,
    xattrs: Xattrs,
    blocks: Vec<u64>,
    content: Vec<u8>,
}

/// All nodes that can be reached from the root, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreePicture(BTreeMap<Vec<u8>, Rc<TreeNode>>);

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    [path, b"/", name].concat()
}

impl TreePicture {
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
            let node = TreeNode { id, inode, xattrs: store.xattrs(id)?, blocks, content };
            tree.0.insert(path, Rc::new(node));
        }
        Ok(tree)
    }

    /// Reads the model's tree.
    ///
    /// Nodes that have not changed since `before` come from there: every update leaves a time of its own.
    pub fn of_model(model: &ModelTree, before: &Self) -> Self {
        let inodes: BTreeMap<InodeId, &Inode> = model.inodes().collect();
        let known: BTreeMap<InodeId, &Rc<TreeNode>> = before.0.values().map(|node| (node.id, node)).collect();
        let mut tree = Self::default();
        let mut ahead = vec![(Vec::new(), InodeId::ROOT)];
        while let Some((path, id)) = ahead.pop() {
            let inode = inodes[&id].clone();
            for (name, entry) in model.entries(id) {
                ahead.push((join(&path, name), entry.inode));
            }
            let node = match known.get(&id).filter(|node| node.inode == inode) {
                Some(node) => Rc::clone(node),
                None => {
                    let mut content = vec![0; content_bytes(&inode)];
                    model.read(id, 0, &mut content);
                    let blocks = model.blocks(id).into_iter().map(|(block, _)| block).collect();
                    Rc::new(TreeNode { id, inode, xattrs: model.xattrs(id), blocks, content })
                }
            };
            tree.0.insert(path, node);
        }
        tree
    }

    /// Returns how many paths differ.
    pub fn distance(&self, other: &Self) -> usize {
        let paths = self.0.keys().chain(other.0.keys().filter(|path| !self.0.contains_key(*path)));
        paths.filter(|path| self.0.get(*path) != other.0.get(*path)).count()
    }

    /// Describes the first difference of the two.
    pub fn difference(&self, other: &Self) -> Option<String> {
        for path in self.0.keys().chain(other.0.keys()) {
            let name = String::from_utf8_lossy(path);
            let (own, other) = match (self.0.get(path), other.0.get(path)) {
                (Some(own), Some(other)) => (own, other),
                (Some(_), None) => return Some(format!("'{name}' should not be there")),
                (None, _) => return Some(format!("'{name}' is missing")),
            };
            if own == other {
                continue;
            }
            if (own.id, &own.inode, &own.xattrs, &own.blocks) == (other.id, &other.inode, &other.xattrs, &other.blocks)
            {
                let at = own.content.iter().zip(&other.content).position(|(own, other)| own != other);
                return Some(format!("'{name}' has other bytes, from {at:?} on"));
            }
            let brief = |node: &TreeNode| {
                let lengths: Vec<usize> = node.xattrs.iter().map(|(_, value)| value.len()).collect();
                format!("{} {:?}, attributes of {lengths:?} bytes, blocks {:?}", node.id, node.inode, node.blocks)
            };
            return Some(format!("'{name}' is\n  {}\ninstead of\n  {}", brief(own), brief(other)));
        }
        None
    }
}

fn content_bytes(inode: &Inode) -> usize {
    if inode.is_directory() { 0 } else { inode.size.min(1 << 20) as usize }
}
