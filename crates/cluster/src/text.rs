//! Document and hard state as text: TOML, which an administrator may read and change.

use std::fmt::Write;
use std::ops::Range;

use ashlar_types::{ArenaId, Epoch, FileSystemId, JournalPosition, NodeNumber};
use serde::Deserialize;
use thiserror::Error;
use toml::Spanned;

use crate::document::{ClusterDocument, DocumentError, DocumentMember, MemberRole};
use crate::hard_state::{AloneSince, HardState};

/// The version of the text.
const FORMAT: u32 = 1;

/// Why a text is no document or hard state.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct TextError {
    /// The line, from 1 on.
    pub line: usize,
    /// The problem, and what to write instead.
    pub problem: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DocumentText {
    format: Spanned<u32>,
    cluster: Spanned<String>,
    epoch: Spanned<EpochText>,
    min_replicas: Spanned<u8>,
    tls: bool,
    next_node: Spanned<u16>,
    #[serde(default)]
    node: Vec<Spanned<MemberText>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct EpochText {
    number: u32,
    node: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberText {
    number: Spanned<u16>,
    arena: Spanned<String>,
    address: Spanned<String>,
    role: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StateText {
    format: Spanned<u32>,
    newest_epoch: Spanned<EpochText>,
    in_sync: bool,
    writer_stopped_at: Option<u64>,
    writer_min_replicas: Option<u8>,
    alone: Option<AloneText>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct AloneText {
    since: u64,
    by_order: bool,
}

impl ClusterDocument {
    /// Reads a document.
    ///
    /// # Errors
    /// [`TextError`]: the text is no TOML, or no document that a cluster can have.
    pub fn from_text(text: &str) -> Result<Self, TextError> {
        let read: DocumentText = parse(text)?;
        let at = |span: Range<usize>, problem: String| TextError { line: line_of(text, span.start), problem };
        check_format(text, &read.format)?;
        let cluster = u128::from_str_radix(read.cluster.get_ref(), 16)
            .ok()
            .filter(|_| read.cluster.get_ref().len() == 32)
            .ok_or_else(|| at(read.cluster.span(), "cluster must have 32 hexadecimal digits".into()))?;
        let mut members = Vec::new();
        for member in &read.node {
            let member = member.get_ref();
            let arena = u64::from_str_radix(member.arena.get_ref(), 16)
                .ok()
                .filter(|_| member.arena.get_ref().len() == 16)
                .ok_or_else(|| at(member.arena.span(), "arena must have 16 hexadecimal digits".into()))?;
            let role = MemberRole::named(member.role.get_ref()).ok_or_else(|| {
                at(member.role.span(), format!("'{}' is no role; write writer or replica", member.role.get_ref()))
            })?;
            let address = member.address.get_ref().clone();
            members.push(DocumentMember { node: node_of(text, &member.number)?, arena: ArenaId(arena), address, role });
        }
        let document = Self {
            cluster: FileSystemId(cluster),
            epoch: epoch_of(text, &read.epoch)?,
            min_replicas: *read.min_replicas.get_ref(),
            tls: read.tls,
            next_node: *read.next_node.get_ref(),
            members,
        };
        document.check().map_err(|error| at(span_of(&error, &read), error.to_string()))?;
        Ok(document)
    }

    /// Returns the document as text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "# The members of this cluster. Change it with 'ashlar cluster' and 'ashlar node'.\n\
             format = {FORMAT}\n\
             cluster = \"{}\"\n\
             epoch = {{ number = {}, node = {} }}\n\
             min_replicas = {}\n\
             tls = {}\n\
             next_node = {}\n",
            self.cluster, self.epoch.number, self.epoch.node, self.min_replicas, self.tls, self.next_node
        );
        for DocumentMember { node, arena, address, role } in &self.members {
            // Checked addresses have no characters that TOML would read otherwise, but for these two.
            let address = address.replace('\\', "\\\\").replace('"', "\\\"");
            let role = role.name();
            _ = write!(
                text,
                "\n[[node]]\nnumber = {node}\narena = \"{arena}\"\naddress = \"{address}\"\nrole = \"{role}\"\n"
            );
        }
        text
    }
}

impl HardState {
    /// Reads a hard state.
    ///
    /// # Errors
    /// [`TextError`].
    pub fn from_text(text: &str) -> Result<Self, TextError> {
        let read: StateText = parse(text)?;
        check_format(text, &read.format)?;
        Ok(Self {
            alone: read
                .alone
                .map(|AloneText { since, by_order }| AloneSince { since: JournalPosition(since), by_order }),
            in_sync: read.in_sync,
            writer_stopped_at: read.writer_stopped_at.map(JournalPosition),
            writer_min_replicas: read.writer_min_replicas,
            newest_epoch: epoch_of(text, &read.newest_epoch)?,
        })
    }

    /// Returns the hard state as text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "# Written by SharedFS. A node that loses this file may serve beside its successor.\n\
             format = {FORMAT}\n\
             newest_epoch = {{ number = {}, node = {} }}\n\
             in_sync = {}\n",
            self.newest_epoch.number, self.newest_epoch.node, self.in_sync
        );
        if let Some(position) = self.writer_stopped_at {
            _ = writeln!(text, "writer_stopped_at = {position}");
        }
        if let Some(min_replicas) = self.writer_min_replicas {
            _ = writeln!(text, "writer_min_replicas = {min_replicas}");
        }
        if let Some(AloneSince { since, by_order }) = self.alone {
            _ = writeln!(text, "alone = {{ since = {since}, by_order = {by_order} }}");
        }
        text
    }
}

fn parse<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, TextError> {
    toml::from_str(text).map_err(|error| TextError {
        line: line_of(text, error.span().map_or(0, |span| span.start)),
        problem: error.message().to_owned(),
    })
}

fn check_format(text: &str, format: &Spanned<u32>) -> Result<(), TextError> {
    if *format.get_ref() == FORMAT {
        return Ok(());
    }
    let problem = format!("format {} is of another version of Ashlar; this one reads {FORMAT}", format.get_ref());
    Err(TextError { line: line_of(text, format.span().start), problem })
}

fn node_of(text: &str, number: &Spanned<u16>) -> Result<NodeNumber, TextError> {
    NodeNumber::new(*number.get_ref()).ok_or_else(|| TextError {
        line: line_of(text, number.span().start),
        problem: format!("{} is no node's number; the largest is {}", number.get_ref(), NodeNumber::MAX),
    })
}

fn epoch_of(text: &str, epoch: &Spanned<EpochText>) -> Result<Epoch, TextError> {
    let EpochText { number, node } = *epoch.get_ref();
    let node = node_of(text, &Spanned::new(epoch.span(), node))?;
    Ok(Epoch { number, node })
}

/// Returns the line of a byte, from 1 on.
fn line_of(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|byte| *byte == b'\n').count()
}

/// Returns the place to which a document's error belongs.
fn span_of(error: &DocumentError, text: &DocumentText) -> Range<usize> {
    let last = |is_it: &dyn Fn(&MemberText) -> bool| {
        text.node.iter().rev().find(|member| is_it(member.get_ref())).map(Spanned::get_ref)
    };
    let found = match error {
        DocumentError::SameNode(node) | DocumentError::UsedNumber { node, .. } => {
            last(&|member| *member.number.get_ref() == node.get()).map(|member| member.number.span())
        }
        DocumentError::SameArena(arena) => {
            let arena = arena.to_string();
            last(&|member| *member.arena.get_ref() == arena).map(|member| member.arena.span())
        }
        DocumentError::SameAddress(address) | DocumentError::Address(address) => {
            last(&|member| member.address.get_ref() == address).map(|member| member.address.span())
        }
        DocumentError::MinReplicas(_) => Some(text.min_replicas.span()),
        DocumentError::EpochNode(_) => Some(text.epoch.span()),
        DocumentError::Writers(1..) => {
            last(&|member| member.role.get_ref() == MemberRole::Writer.name()).map(|member| member.role.span())
        }
        _ => text.node.last().map(Spanned::span),
    };
    found.unwrap_or(0..0)
}
