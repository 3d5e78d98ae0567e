//! Path resolution, as the kernel does it, and the calls that follow from it.
//!
//! A front end describes the file system's surroundings ([`PathContext`]). A path's meaning inside the file system is
//! the same for all front ends.

use std::borrow::Cow;

use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId};
use ashlar_wire::OperationKind;
use smallvec::SmallVec;

use crate::LibFs;
use crate::api::{FoundInode, Outcome, RenameFlags, check_name};
use crate::leases::claim::Claim;
use crate::names::path_cache::{PathCache, PathEnd, PathWay};

/// Symbolic links to follow in one path, as in the kernel.
const LINKS_MAX: u32 = 40;
/// Bytes of a name that need no allocation.
const NAME_BYTES: usize = 64;
/// `O_TMPFILE` without `O_DIRECTORY`, which it includes.
const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalLink {
    /// It is followed.
    Follow,
    /// The path leads to the link itself.
    Keep,
}

/// The call's next step with the inode that a path leads to.
///
/// If LibFS must send a request for the inode anyhow, it requests all that this step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathPurpose {
    /// Read its attributes.
    Look,
    /// Go on to a name in it.
    Pass,
    /// Read it, or list it.
    Read,
    /// Write into it, or truncate it.
    Write,
    /// Change its attributes.
    SetAttributes,
    /// Remove or move the name.
    Name,
}

impl PathPurpose {
    /// Returns the claim on the inode that a path leads to.
    pub(crate) fn claim(self, id: InodeId) -> Claim {
        let claim = Claim::read(id);
        match self {
            Self::Look => claim,
            Self::Pass => claim.with_entries(),
            Self::Read => claim.with_contents().with_entries(),
            Self::Write => claim.soon_written().with_contents(),
            Self::SetAttributes | Self::Name => claim.soon_written(),
        }
    }
}

/// The call's intent for the end of a path.
#[derive(Clone, Copy, Debug)]
pub struct PathIntent {
    last: FinalLink,
    purpose: PathPurpose,
    /// If the name is absent, the call creates it next.
    makes: bool,
    /// It creates it by opening it, which creates no directory.
    opens: bool,
}

impl FinalLink {
    /// Returns the intent for a purpose.
    #[must_use]
    pub fn to(self, purpose: PathPurpose) -> PathIntent {
        PathIntent { last: self, purpose, makes: false, opens: false }
    }
}

impl PathIntent {
    /// Returns the intent of a call that creates the name if it is absent.
    #[must_use]
    pub fn making(self) -> Self {
        Self { makes: true, ..self }
    }

    /// Returns the intent of `open` with these flags.
    #[must_use]
    pub fn of_open_flags(flags: i32) -> Self {
        let has = |flag| flags & flag != 0;
        let is_new = has(libc::O_CREAT) && has(libc::O_EXCL);
        let purpose = match flags & libc::O_ACCMODE {
            _ if has(libc::O_PATH) || is_new => PathPurpose::Look,
            libc::O_WRONLY => PathPurpose::Write,
            _ if has(libc::O_TRUNC) => PathPurpose::Write,
            // A program that opens for both may only read. With a lease to read, other sessions can read along.
            _ => PathPurpose::Read,
        };
        let last = if has(libc::O_NOFOLLOW) || is_new { FinalLink::Keep } else { FinalLink::Follow };
        let makes = has(libc::O_CREAT) && !has(libc::O_PATH);
        Self { last, purpose, makes, opens: makes }
    }

    /// Returns whether the call concerns the last name itself.
    ///
    /// A slash behind such a name neither follows a link nor demands a directory.
    fn is_of_name(self) -> bool {
        self.purpose == PathPurpose::Name || self.makes && !self.opens
    }

    /// Returns the claim on the inode that a path leads to.
    pub(crate) fn claim(self, id: InodeId) -> Claim {
        self.purpose.claim(id)
    }

    /// Returns whether a symbolic link at the end is followed.
    #[must_use]
    pub fn follows(self) -> bool {
        self.last == FinalLink::Follow
    }
}

impl From<FinalLink> for PathIntent {
    fn from(last: FinalLink) -> Self {
        last.to(PathPurpose::Look)
    }
}

/// Where a path leads.
#[derive(Clone, Debug)]
pub struct ResolvedPath {
    /// The directory of the last name.
    pub directory: InodeId,
    /// The last name; `.` or `..` if the path ends so, or leads to its own beginning.
    pub name: SmallVec<[u8; NAME_BYTES]>,
    /// The inode at the name, if the name exists.
    pub found: Option<FoundInode>,
    /// The path ends with a slash, so it must lead to a directory.
    pub is_directory_wanted: bool,
}

/// Where a walk ended.
#[allow(clippy::large_enum_variant, reason = "it lives for one call, on the stack")]
#[derive(Debug)]
pub enum WalkOutcome {
    /// In the file system.
    Inside(ResolvedPath),
    /// The path leaves the file system.
    Outside,
}

/// A front end's knowledge of the world around the file system.
pub trait PathContext {
    /// Returns the user whose rights decide on paths.
    fn user(&self) -> &Credentials;

    /// Returns the rest of an absolute path that leads into the file system; `None` if it leads elsewhere.
    fn inside<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]>;

    /// Returns whether another file system is mounted on a directory, so that the path leaves there.
    fn is_covered(&self, directory: InodeId) -> bool;

    /// Changes when a result of [`Self::is_covered`] changes.
    fn submount_version(&self) -> u64;

    /// The paths that were followed here lately, for this user.
    fn paths(&self) -> &PathCache;

    /// Returns whether a link in `directory` at a path's end may be followed here; if not, the path leaves.
    ///
    /// # Errors
    /// `EACCES` if no process may follow it.
    fn may_follow(&self, directory: InodeId, link: &FoundInode) -> Outcome<bool>;
}

impl LibFs {
    /// Follows a path from a directory as the kernel does. A slash at its beginning is ignored.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `EACCES`, `ELOOP`, `ENAMETOOLONG`.
    pub fn walk(
        &self,
        context: &impl PathContext,
        from: InodeId,
        path: &[u8],
        intent: impl Into<PathIntent>,
    ) -> Outcome<WalkOutcome> {
        let intent @ PathIntent { last, purpose, makes, opens } = intent.into();
        let _measured = self.begin_operation(OperationKind::Name);
        // The version is read first: the path is remembered as of now, and later mounts make it stale.
        let submount_version = context.submount_version();
        if let Some(place) = self.resolve_cached(context, submount_version, from, path, intent) {
            return Ok(WalkOutcome::Inside(place));
        }
        let (mut at, mut cursor, mut way) =
            self.cached_beginning(context, submount_version, from, path).unwrap_or((from, 0, PathWay::default()));
        let is_begun = cursor != 0;
        let asked = path;
        let mut links = 0;
        let mut path = Cow::Borrowed(path);
        loop {
            let rest = &path[cursor..];
            let begin = rest.iter().position(|&byte| byte != b'/').unwrap_or(rest.len());
            let rest = &rest[begin..];
            if rest.is_empty() {
                let found = Some(self.find_inode(at)?);
                let name = SmallVec::from_slice(b".");
                return Ok(WalkOutcome::Inside(ResolvedPath { directory: at, name, found, is_directory_wanted: true }));
            }
            let end = rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len());
            let (name, behind) = rest.split_at(end);
            let is_directory_wanted = !behind.is_empty();
            let is_last = behind.iter().all(|&byte| byte == b'/');
            if name == b".." && at == InodeId::ROOT {
                return Ok(WalkOutcome::Outside);
            }
            if is_last && !is_begun && way.can_be_remembered() {
                let way_there = &asked[..asked.len() - rest.len()];
                context.paths().remember_beginning(submount_version, from, way_there, &way, at);
            }
            let place =
                |found| ResolvedPath { directory: at, name: SmallVec::from_slice(name), found, is_directory_wanted };
            if is_last && opens && is_directory_wanted && name != b"." && name != b".." {
                self.check_access(context.user(), at, Access::EXECUTE)?;
                return Err(Errno::EISDIR);
            }
            if !is_last {
                match self.pass_directory(context.user(), at, name, &mut way) {
                    Ok(Some(next)) => {
                        if context.is_covered(next) {
                            return Ok(WalkOutcome::Outside);
                        }
                        at = next;
                        cursor = path.len() - behind.len();
                        continue;
                    }
                    Ok(None) => {}
                    Err(errno) => return Err(self.path_error(errno, at, from)),
                }
            }
            let meant = if is_last { (purpose, makes) } else { (PathPurpose::Look, false) };
            let found = match self.walk_step(context.user(), at, name, meant, &mut way) {
                Ok(found) => found,
                Err(Errno::ENOENT) if is_last => return Ok(WalkOutcome::Inside(place(None))),
                Err(Errno::ENAMETOOLONG) if is_last && purpose == PathPurpose::Name => {
                    return Ok(WalkOutcome::Inside(place(None)));
                }
                Err(errno) => return Err(self.path_error(errno, at, from)),
            };
            if context.is_covered(found.id) {
                return Ok(WalkOutcome::Outside);
            }
            let is_name = is_last && intent.is_of_name();
            let is_followed = !is_last || last == FinalLink::Follow || is_directory_wanted && !is_name;
            if found.inode.kind == FileKind::Symlink && is_followed {
                links += 1;
                if links > LINKS_MAX {
                    return Err(Errno::ELOOP);
                }
                if is_last && !context.may_follow(at, &found)? {
                    return Ok(WalkOutcome::Outside);
                }
                way.mark_winding();
                let joined = [&found.inode.target[..], behind].concat();
                cursor = 0;
                if joined.first() == Some(&b'/') {
                    let Some(inside) = context.inside(&joined) else { return Ok(WalkOutcome::Outside) };
                    at = InodeId::ROOT;
                    cursor = joined.len() - inside.len();
                }
                path = Cow::Owned(joined);
                continue;
            }
            if !found.inode.is_directory() && is_directory_wanted && !is_name {
                return Err(Errno::ENOTDIR);
            }
            if is_last {
                if !is_directory_wanted && way.can_be_remembered() {
                    context.paths().remember_end(
                        submount_version,
                        from,
                        asked,
                        &way,
                        PathEnd { directory: at, id: found.id },
                    );
                }
                return Ok(WalkOutcome::Inside(place(Some(found))));
            }
            at = found.id;
            cursor = path.len() - behind.len();
        }
    }

    /// Returns where a path leads that was followed before; `None` if it must be followed again.
    fn resolve_cached(
        &self,
        context: &impl PathContext,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
        intent: PathIntent,
    ) -> Option<ResolvedPath> {
        let end = context.paths().find_end(self, submount_version, from, path)?;
        // The inode at the end may be gone, and a link may lead on.
        let found = self.find_attributes(intent.claim(end.id)).ok()?;
        if found.inode.kind == FileKind::Symlink && intent.follows() {
            return None;
        }
        let name = SmallVec::from_slice(last_name(path)?);
        Some(ResolvedPath { directory: end.directory, name, found: Some(found), is_directory_wanted: false })
    }

    /// Returns the directory of a path's last name, if the way there was followed before.
    ///
    /// With it come the offset of that name, and the way.
    fn cached_beginning(
        &self,
        context: &impl PathContext,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
    ) -> Option<(InodeId, usize, PathWay)> {
        let length = path.len() - last_name(path)?.len();
        let (directory, way) = context.paths().find_beginning(self, submount_version, from, &path[..length])?;
        Some((directory, length, way))
    }

    /// Returns the whole path's error for a failed step.
    ///
    /// If a directory on the way was removed after it was looked up, the path does not exist.
    fn path_error(&self, errno: Errno, directory: InodeId, from: InodeId) -> Errno {
        let is_gone =
            errno == Errno::ESTALE && directory != from && self.find_inode(directory).err() == Some(Errno::ESTALE);
        if is_gone { Errno::ENOENT } else { errno }
    }

    /// Returns the directory that a name leads to, for a name that isn't its path's last one.
    ///
    /// `None` if it leads to no directory, or the name is `.` or `..`. The directory itself is not requested: the next
    /// name's lookup does that.
    fn pass_directory(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        way: &mut PathWay,
    ) -> Outcome<Option<InodeId>> {
        if name == b"." || name == b".." {
            return Ok(None);
        }
        let directory_version = self.directory_versions.version_of(directory);
        let (entry, lease) =
            self.look_up_entry(user, Claim::read(directory), name, &|id| PathPurpose::Pass.claim(id))?;
        let entry = entry.ok_or(Errno::ENOENT)?;
        if entry.kind != FileKind::Directory {
            return Ok(None);
        }
        way.add_step(directory, directory_version, lease);
        Ok(Some(entry.inode))
    }

    /// Looks up a name on a path's way.
    fn walk_step(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        (purpose, makes): (PathPurpose, bool),
        way: &mut PathWay,
    ) -> Outcome<FoundInode> {
        if name == b"." || name == b".." {
            way.mark_winding();
            return self.lookup_dot(user, directory, name);
        }
        let directory_version = self.directory_versions.version_of(directory);
        let (found, lease) = self.look_up(user, directory, name, purpose, makes)?;
        way.add_step(directory, directory_version, lease);
        Ok(found)
    }

    /// Removes the name at the end of a path: `unlink` and `rmdir`.
    ///
    /// # Errors
    /// As [`LibFs::unlink`] and [`LibFs::remove_directory`]; `EBUSY` for the root.
    pub fn remove_at(&self, user: &Credentials, place: &ResolvedPath, removes_directory: bool) -> Outcome<()> {
        let found = place.found_to_change()?;
        if removes_directory && found.id == InodeId::ROOT {
            return Err(Errno::EBUSY);
        }
        if !removes_directory && place.is_directory_wanted {
            return Err(if found.inode.is_directory() { Errno::EISDIR } else { Errno::ENOTDIR });
        }
        self.remove_name(user, place.directory, &place.name, removes_directory, (None, Some(found.entry())))
    }

    /// Renames the name at the end of a path.
    ///
    /// # Errors
    /// As [`LibFs::rename`]; `EBUSY` for `.` and `..`.
    pub fn rename_at(
        &self,
        user: &Credentials,
        source: &ResolvedPath,
        target: &ResolvedPath,
        flags: RenameFlags,
    ) -> Outcome<()> {
        if source.is_dot() {
            return Err(Errno::EBUSY);
        }
        if target.is_dot() {
            return Err(if flags.no_replace { Errno::EEXIST } else { Errno::EBUSY });
        }
        let moved = source.found_to_change()?;
        match target.found_to_change() {
            Ok(_) if flags.no_replace => return Err(Errno::EEXIST),
            Err(Errno::ENOENT) if !flags.exchange => {}
            found => drop(found?),
        }
        // In an exchange, a slash behind each path demands a directory at that path.
        let other = if flags.exchange { target.found.as_ref() } else { Some(moved) };
        let is_wrong =
            |place: &ResolvedPath, found: &FoundInode| place.is_directory_wanted && !found.inode.is_directory();
        if is_wrong(source, moved) || other.is_some_and(|other| is_wrong(target, other)) {
            return Err(Errno::ENOTDIR);
        }
        let found_entries = (moved.entry(), target.found.as_ref().map(FoundInode::entry));
        self.rename_found(
            user,
            (source.directory, &source.name),
            (target.directory, &target.name),
            flags,
            Some(found_entries),
        )
    }
}

/// Returns the name behind a path's last slash; `None` if nothing follows it.
fn last_name(path: &[u8]) -> Option<&[u8]> {
    path.rsplit(|&byte| byte == b'/').next().filter(|name| !name.is_empty())
}

/// The action that `open` takes.
#[derive(Debug)]
pub enum OpenAction<'a> {
    /// Create a regular file at the name.
    Create,
    /// Create a file without a name in this directory.
    CreateUnnamed(InodeId),
    /// Open an existing regular file or directory, with this access.
    Existing(&'a FoundInode, Access),
}

impl ResolvedPath {
    /// Returns whether the path ends with `.` or `..`, or leads to its own beginning.
    #[must_use]
    pub fn is_dot(&self) -> bool {
        self.name[..] == *b"." || self.name[..] == *b".."
    }

    /// Returns the inode found here, for a call that changes the name.
    ///
    /// The kernel looks up the last name once the rest of the path is resolved.
    ///
    /// # Errors
    /// `ENOENT`; `ENAMETOOLONG`.
    fn found_to_change(&self) -> Outcome<&FoundInode> {
        match &self.found {
            Some(found) => Ok(found),
            None => check_name(&self.name).and(Err(Errno::ENOENT)),
        }
    }

    /// Checks that a new inode can be created here.
    ///
    /// # Errors
    /// `EEXIST`; `ENOENT` if the path ends with a slash and the new inode is no directory.
    pub fn check_new(&self, makes_directory: bool) -> Outcome<()> {
        if self.found.is_some() {
            return Err(Errno::EEXIST);
        }
        if self.is_directory_wanted && !makes_directory { Err(Errno::ENOENT) } else { Ok(()) }
    }

    /// Returns the action that `open` with these flags takes here.
    ///
    /// # Errors
    /// `ENOENT`, `EEXIST`, `EISDIR`, `ENOTDIR`, `EINVAL`; `ELOOP` if a link must not be followed; `ENXIO` for devices,
    /// pipes and sockets, which LibFS can't open.
    pub fn opening(&self, flags: i32) -> Outcome<OpenAction<'_>> {
        if flags & TMPFILE != 0 {
            return self.opening_unnamed(flags);
        }
        let Some(found) = &self.found else {
            return match flags {
                flags if flags & libc::O_CREAT == 0 => Err(Errno::ENOENT),
                _ if self.is_directory_wanted => Err(Errno::EISDIR),
                flags if flags & libc::O_DIRECTORY != 0 => Err(Errno::EINVAL),
                _ => Ok(OpenAction::Create),
            };
        };
        if flags & libc::O_CREAT != 0 {
            if flags & libc::O_EXCL != 0 {
                return Err(Errno::EEXIST);
            }
            if found.inode.is_directory() {
                return Err(Errno::EISDIR);
            }
        }
        let changes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        match found.inode.kind {
            FileKind::Symlink if flags & libc::O_DIRECTORY == 0 => Err(Errno::ELOOP),
            FileKind::Directory if changes => Err(Errno::EISDIR),
            FileKind::Directory => Ok(OpenAction::Existing(found, access_of(flags))),
            _ if flags & libc::O_DIRECTORY != 0 => Err(Errno::ENOTDIR),
            FileKind::Regular => Ok(OpenAction::Existing(found, access_of(flags))),
            _ => Err(Errno::ENXIO),
        }
    }

    fn opening_unnamed(&self, flags: i32) -> Outcome<OpenAction<'_>> {
        let found = self.found.as_ref().ok_or(Errno::ENOENT)?;
        if !found.inode.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        if flags & libc::O_ACCMODE == libc::O_RDONLY {
            return Err(Errno::EINVAL);
        }
        Ok(OpenAction::CreateUnnamed(found.id))
    }
}

/// Returns the access that `open` with these flags needs to an existing inode.
#[must_use]
pub fn access_of(flags: i32) -> Access {
    let mode = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => Access::READ,
        libc::O_WRONLY => Access::WRITE,
        _ => Access::READ | Access::WRITE,
    };
    if flags & libc::O_TRUNC != 0 { mode | Access::WRITE } else { mode }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::{Inode, Timestamp};

    fn place(kind: Option<FileKind>, is_directory_wanted: bool) -> ResolvedPath {
        let inode = |kind| Inode::new(kind, 0o644, InodeId::ROOT, Timestamp::default());
        let found = kind.map(|kind| FoundInode { id: InodeId(20), inode: inode(kind) });
        ResolvedPath { directory: InodeId::ROOT, name: SmallVec::from_slice(b"name"), found, is_directory_wanted }
    }

    fn refusal(kind: Option<FileKind>, slash: bool, flags: i32) -> Option<Errno> {
        place(kind, slash).opening(flags).err()
    }

    #[test]
    fn open_refuses_flags_that_the_kernel_refuses() {
        use libc::{O_CREAT, O_DIRECTORY, O_EXCL, O_RDONLY, O_RDWR, O_TMPFILE, O_TRUNC, O_WRONLY};
        let (file, directory) = (Some(FileKind::Regular), Some(FileKind::Directory));
        for (kind, slash, flags, expected) in [
            (None, false, O_RDWR, Some(Errno::ENOENT)),
            (None, false, O_RDWR | O_CREAT, None),
            (None, true, O_RDWR | O_CREAT, Some(Errno::EISDIR)),
            (None, false, O_RDWR | O_CREAT | O_DIRECTORY, Some(Errno::EINVAL)),
            (file, false, O_WRONLY | O_CREAT | O_EXCL, Some(Errno::EEXIST)),
            (file, false, O_RDONLY | O_DIRECTORY, Some(Errno::ENOTDIR)),
            (file, false, O_RDONLY | O_TRUNC, None),
            (directory, true, O_RDONLY | O_DIRECTORY, None),
            (directory, false, O_WRONLY, Some(Errno::EISDIR)),
            (directory, false, O_RDONLY | O_TRUNC, Some(Errno::EISDIR)),
            (directory, false, O_RDONLY | O_CREAT, Some(Errno::EISDIR)),
            (directory, false, O_RDWR | O_TMPFILE, None),
            (directory, false, O_RDONLY | O_TMPFILE, Some(Errno::EINVAL)),
            (file, false, O_RDWR | O_TMPFILE, Some(Errno::ENOTDIR)),
            (Some(FileKind::Symlink), false, O_RDONLY, Some(Errno::ELOOP)),
            (Some(FileKind::Symlink), false, O_RDONLY | O_DIRECTORY, Some(Errno::ENOTDIR)),
            (Some(FileKind::Fifo), false, O_RDONLY, Some(Errno::ENXIO)),
        ] {
            assert_eq!(refusal(kind, slash, flags), expected, "{kind:?} {slash} {flags:o}");
        }
    }

    #[test]
    fn slash_behind_a_name_to_change_follows_no_link() {
        let (keep, follow) = (FinalLink::Keep, FinalLink::Follow);
        assert!(keep.to(PathPurpose::Name).is_of_name() && keep.to(PathPurpose::Look).making().is_of_name());
        let opens = [libc::O_RDONLY, libc::O_CREAT, libc::O_CREAT | libc::O_EXCL, libc::O_NOFOLLOW];
        assert!(opens.into_iter().all(|flags| !PathIntent::of_open_flags(flags).is_of_name()));
        assert!(
            [keep.to(PathPurpose::Look), follow.to(PathPurpose::SetAttributes)]
                .into_iter()
                .all(|intent| !intent.is_of_name())
        );
    }

    #[test]
    fn truncating_open_needs_write_access() {
        let file = place(Some(FileKind::Regular), false);
        let Ok(OpenAction::Existing(_, access)) = file.opening(libc::O_RDONLY | libc::O_TRUNC) else {
            panic!("refused")
        };
        assert_eq!(access, Access::READ | Access::WRITE);
    }

    #[test]
    fn only_directories_are_created_with_a_trailing_slash() {
        assert_eq!(place(None, true).check_new(true), Ok(()));
        assert_eq!(place(None, true).check_new(false), Err(Errno::ENOENT));
        assert_eq!(place(Some(FileKind::Regular), false).check_new(false), Err(Errno::EEXIST));
    }
}
