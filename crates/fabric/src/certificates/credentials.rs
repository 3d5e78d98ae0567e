//! A node's certificate and key.

use std::fmt;
use std::path::Path;

use ashlar_types::{FileSystemId, NodeNumber};
use rustls::client::verify_server_name;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;

use super::error::CredentialsError;
use super::key_file;

const CA_FILE: &str = "ca.pem";
const CERTIFICATE_FILE: &str = "node.pem";
const KEY_FILE: &str = "node-key.pem";

/// The proof of a node's number in its cluster, in PEM.
#[derive(Clone)]
pub struct NodeCredentials {
    /// The certificate of the cluster's authority.
    pub ca: String,
    /// The node's certificate.
    pub certificate: String,
    /// The node's private key.
    pub key: String,
}

impl fmt::Debug for NodeCredentials {
    /// Leaves out the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCredentials").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl NodeCredentials {
    /// Makes the files `ca.pem`, `node.pem` and `node-key.pem` in a directory.
    ///
    /// # Errors
    /// [`CredentialsError::Write`], also if one of the files exists.
    pub fn save(&self, directory: &Path) -> Result<(), CredentialsError> {
        key_file::write_key(&directory.join(KEY_FILE), &self.key)?;
        key_file::write_certificate(&directory.join(CERTIFICATE_FILE), &self.certificate)?;
        key_file::write_certificate(&directory.join(CA_FILE), &self.ca)
    }

    /// Reads the files of [`NodeCredentials::save`].
    ///
    /// # Errors
    /// [`CredentialsError::Read`], and [`CredentialsError::Exposed`] if other users may read the key.
    pub fn load(directory: &Path) -> Result<Self, CredentialsError> {
        Ok(Self {
            key: key_file::read_key(&directory.join(KEY_FILE))?,
            certificate: key_file::read_certificate(&directory.join(CERTIFICATE_FILE))?,
            ca: key_file::read_certificate(&directory.join(CA_FILE))?,
        })
    }
}

/// Credentials that have been read, and belong to a node.
pub(crate) struct ParsedCredentials {
    pub(crate) ca: CertificateDer<'static>,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl ParsedCredentials {
    /// Reads credentials; refuses those of another node, or of another cluster.
    pub(crate) fn parse(
        credentials: &NodeCredentials,
        cluster: FileSystemId,
        node: NodeNumber,
    ) -> Result<Self, CredentialsError> {
        let subject = format!("the certificate of node {node}");
        let invalid = |cause: String| CredentialsError::Invalid { subject: subject.clone(), cause };
        let ca = parse_certificate(&credentials.ca, "the certificate of the cluster's authority")?;
        let certificate = parse_certificate(&credentials.certificate, &subject)?;
        let key = parse_key(&credentials.key, &format!("the key of node {node}"))?;
        check_name(&certificate, &node_name(cluster, node)).map_err(invalid)?;
        check_pair(&certificate, &key).map_err(invalid)?;
        Ok(Self { ca, certificate, key })
    }
}

/// Returns the name in a node's certificate.
pub(crate) fn node_name(cluster: FileSystemId, node: NodeNumber) -> String {
    format!("node-{node}.{cluster}.ashlar")
}

/// Whether a certificate has a name. Its signature is checked elsewhere.
pub(crate) fn check_name(certificate: &CertificateDer<'_>, name: &str) -> Result<(), String> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| error.to_string())?;
    let server = ServerName::try_from(name).map_err(|error| error.to_string())?;
    verify_server_name(&parsed, &server).map_err(|_| format!("it does not name {name}"))
}

pub(super) fn parse_certificate(pem: &str, subject: &str) -> Result<CertificateDer<'static>, CredentialsError> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| CredentialsError::Invalid { subject: subject.to_owned(), cause: error.to_string() })
}

pub(super) fn parse_key(pem: &str, subject: &str) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| CredentialsError::Invalid { subject: subject.to_owned(), cause: error.to_string() })
}

/// Whether a key is that of a certificate.
pub(super) fn check_pair(certificate: &CertificateDer<'static>, key: &PrivateKeyDer<'static>) -> Result<(), String> {
    CertifiedKey::from_der(vec![certificate.clone()], key.clone_key(), &ring::default_provider())
        .and_then(|pair| pair.keys_match())
        .map_err(|error| error.to_string())
}
