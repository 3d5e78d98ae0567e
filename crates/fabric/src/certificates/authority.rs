//! A cluster's certificate authority.

use std::fmt;
use std::path::Path;

use ashlar_types::{FileSystemId, NodeNumber};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use super::credentials::{NodeCredentials, check_name, check_pair, node_name, parse_certificate, parse_key};
use super::error::CredentialsError;
use super::key_file;

const CA_FILE: &str = "ca.pem";
const KEY_FILE: &str = "ca-key.pem";
const SUBJECT: &str = "the certificate of the cluster's authority";

/// A cluster's certificate authority: it issues the certificates of nodes.
pub struct ClusterAuthority {
    cluster: FileSystemId,
    key: KeyPair,
    certificate: String,
}

impl fmt::Debug for ClusterAuthority {
    /// Leaves out the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterAuthority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl ClusterAuthority {
    /// Makes the authority of a cluster, with a new key.
    ///
    /// # Errors
    /// [`CredentialsError::Issue`].
    pub fn create(cluster: FileSystemId) -> Result<Self, CredentialsError> {
        let failed =
            |error: rcgen::Error| CredentialsError::Issue { subject: SUBJECT.into(), cause: error.to_string() };
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = authority_params(cluster).and_then(|params| params.self_signed(&key)).map_err(failed)?.pem();
        Ok(Self { cluster, key, certificate })
    }

    /// Makes the files `ca.pem` and `ca-key.pem` in a directory.
    ///
    /// # Errors
    /// [`CredentialsError::Write`], also if one of the files exists: a lost key can't be had again.
    pub fn save(&self, directory: &Path) -> Result<(), CredentialsError> {
        key_file::write_key(&directory.join(KEY_FILE), &self.key.serialize_pem())?;
        key_file::write_certificate(&directory.join(CA_FILE), &self.certificate)
    }

    /// Reads the files of [`ClusterAuthority::save`].
    ///
    /// # Errors
    /// [`CredentialsError`]: a file is missing or damaged, other users may read the key, the two don't belong together,
    /// or to this cluster.
    pub fn load(directory: &Path, cluster: FileSystemId) -> Result<Self, CredentialsError> {
        let key_path = directory.join(KEY_FILE);
        let key_pem = key_file::read_key(&key_path)?;
        let certificate = key_file::read_certificate(&directory.join(CA_FILE))?;
        Self::from_pem(cluster, certificate, &key_pem, &key_path.display().to_string())
    }

    /// Returns the authority of a certificate and a key. `key_name` names the key in errors.
    ///
    /// # Errors
    /// [`CredentialsError::Invalid`]: one is damaged, or they don't belong together or to this cluster.
    pub fn from_pem(
        cluster: FileSystemId,
        certificate: String,
        key_pem: &str,
        key_name: &str,
    ) -> Result<Self, CredentialsError> {
        let invalid = |cause| CredentialsError::Invalid { subject: SUBJECT.into(), cause };
        let parsed = parse_certificate(&certificate, SUBJECT)?;
        check_name(&parsed, &authority_name(cluster)).map_err(invalid)?;
        let subject = format!("the key {key_name}");
        check_pair(&parsed, &parse_key(key_pem, &subject)?).map_err(invalid)?;
        let key = KeyPair::from_pem(key_pem);
        let key = key.map_err(|error| CredentialsError::Invalid { subject, cause: error.to_string() })?;
        Ok(Self { cluster, key, certificate })
    }

    /// Returns the key. A process that has it can make itself a node of the cluster.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Issues a node's certificate, with a new key.
    ///
    /// # Errors
    /// [`CredentialsError::Issue`].
    pub fn issue(&self, node: NodeNumber) -> Result<NodeCredentials, CredentialsError> {
        let failed = |error: rcgen::Error| CredentialsError::Issue {
            subject: format!("the certificate of node {node}"),
            cause: error.to_string(),
        };
        let issuer = Issuer::new(authority_params(self.cluster).map_err(failed)?, &self.key);
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = params(&node_name(self.cluster, node)).map_err(failed)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?.pem();
        Ok(NodeCredentials { ca: self.certificate.clone(), certificate, key: key.serialize_pem() })
    }
}

fn authority_name(cluster: FileSystemId) -> String {
    format!("authority.{cluster}.ashlar")
}

fn authority_params(cluster: FileSystemId) -> Result<CertificateParams, rcgen::Error> {
    let mut params = params(&authority_name(cluster))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(params)
}

/// A certificate of this name, valid as long as the clock of any machine in use may say.
fn params(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new([name.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(1970, 1, 1);
    params.not_after = date_time_ymd(2126, 1, 1);
    Ok(params)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::credentials::ParsedCredentials;
    use super::*;

    const CLUSTER: FileSystemId = FileSystemId(0xabc);

    fn node(number: u16) -> NodeNumber {
        NodeNumber::new(number).unwrap()
    }

    #[test]
    fn saved_authority_issues_certificates_after_loading() {
        let directory = tempfile::tempdir().unwrap();
        ClusterAuthority::create(CLUSTER).unwrap().save(directory.path()).unwrap();
        let mode = std::fs::metadata(directory.path().join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let authority = ClusterAuthority::load(directory.path(), CLUSTER).unwrap();
        let of_node = tempfile::tempdir().unwrap();
        authority.issue(node(3)).unwrap().save(of_node.path()).unwrap();
        let credentials = NodeCredentials::load(of_node.path()).unwrap();
        ParsedCredentials::parse(&credentials, CLUSTER, node(3)).unwrap();
        for (cluster, number) in [(CLUSTER, 4), (FileSystemId(1), 3)] {
            let error = ParsedCredentials::parse(&credentials, cluster, node(number)).err().unwrap();
            assert!(error.to_string().contains("does not name"), "{error}");
        }
        assert!(!format!("{credentials:?}").contains("PRIVATE"));
    }

    #[test]
    fn key_readable_by_others_is_refused_with_remedy() {
        let directory = tempfile::tempdir().unwrap();
        ClusterAuthority::create(CLUSTER).unwrap().save(directory.path()).unwrap();
        let key = directory.path().join(KEY_FILE);
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = ClusterAuthority::load(directory.path(), CLUSTER).unwrap_err();
        assert!(matches!(error, CredentialsError::Exposed { mode: 0o640, .. }), "{error}");
        assert!(error.to_string().contains(&format!("chmod 600 {}", key.display())), "{error}");
    }

    #[test]
    fn existing_authority_is_never_replaced() {
        let directory = tempfile::tempdir().unwrap();
        ClusterAuthority::create(CLUSTER).unwrap().save(directory.path()).unwrap();
        let error = ClusterAuthority::create(CLUSTER).unwrap().save(directory.path()).unwrap_err();
        assert!(matches!(error, CredentialsError::Write { .. }), "{error}");
        ClusterAuthority::load(directory.path(), CLUSTER).unwrap();
    }

    #[test]
    fn foreign_or_damaged_files_are_refused() {
        let (ours, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        ClusterAuthority::create(CLUSTER).unwrap().save(ours.path()).unwrap();
        ClusterAuthority::create(CLUSTER).unwrap().save(other.path()).unwrap();
        assert!(ClusterAuthority::load(ours.path(), FileSystemId(1)).is_err(), "another cluster's");
        std::fs::copy(other.path().join(CA_FILE), ours.path().join(CA_FILE)).unwrap();
        assert!(ClusterAuthority::load(ours.path(), CLUSTER).is_err(), "another key's");
        std::fs::write(other.path().join(CA_FILE), "-----BEGIN CERTIFICATE-----\n").unwrap();
        assert!(ClusterAuthority::load(other.path(), CLUSTER).is_err(), "a damaged one");
    }
}
