//! The rows of a new shared area.

use ashlar_types::{FileKind, Inode, InodeId, SessionId, Timestamp};

use crate::StoreError;
use crate::database::Database;
use crate::medium::StoreIdentity;
use crate::metadata::rows::{self, StoredCounters, Superblock, kind};
use crate::quotas;

/// Writes the rows of an empty shared area into a database that has none.
pub fn format_database(database: &Database, identity: StoreIdentity, at: Timestamp) -> Result<(), StoreError> {
    if database.snapshot()?.get(&[kind::SUPERBLOCK])?.is_some() {
        return Ok(());
    }
    let superblock = Superblock { versions: rows::FORMAT_VERSIONS, arena: identity.id, is_whole: true };
    let counters = first_counters(identity);
    let mut writer = database.write(5, 1024)?;
    writer.put(&[kind::SUPERBLOCK], &rows::encode_superblock(superblock))?;
    writer.put(&[kind::COUNTERS], &rows::encode_counters(counters))?;
    rows::encode_inode(&root_directory(at), &mut writer.value);
    writer.put_inode(&rows::key1(kind::INODE, InodeId::ROOT.0))?;
    for (key, value) in quotas::rows_of_new(&root_directory(at)) {
        writer.put(&key, &value)?;
    }
    writer.commit()
}

/// The counters of a node that has given out no number.
pub fn first_counters(identity: StoreIdentity) -> StoredCounters {
    StoredCounters {
        next_inode: InodeId::numbers_of(identity.node).start + InodeId::FIRST_FREE.0,
        next_session: SessionId::numbers_of(identity.node).start + 1,
        reserved_blocks: 0,
    }
}

/// The root directory of a new file system: owned by the super-user, open to all to read.
pub fn root_directory(at: Timestamp) -> Inode {
    Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, at)
}
