//! TLS, and certificates that say which node connects.

use std::io;
use std::sync::Arc;

use ashlar_types::{FileSystemId, NodeNumber};
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, Error, RootCertStore, ServerConfig, ServerConnection};

use super::socket::CountingSocket;
use super::transport::Transport;
use crate::certificates::{CredentialsError, NodeCredentials, ParsedCredentials, check_name, node_name};
use crate::error::LinkRefusal;
use crate::handshake::FIRST_BYTE;
use crate::member::FabricIdentity;

/// How a node's links are protected.
#[derive(Clone, Debug)]
pub enum Security {
    /// Not at all: for networks that nothing foreign reaches.
    Plain,
    /// By TLS 1.3 on both sides, with certificates of the cluster's authority.
    Tls(NodeCredentials),
}

/// [`Security`], ready for use.
pub(super) enum LinkSecurity {
    Plain,
    Tls { client: Arc<ClientConfig>, server: Arc<ServerConfig> },
}

/// A failure of TLS, as the handshake reports it.
pub(super) enum TlsFailure {
    /// This side refuses the peer.
    Refuse(LinkRefusal),
    /// The peer refuses this side.
    Refused(LinkRefusal),
}

impl LinkSecurity {
    pub(super) fn new(security: &Security, identity: &FabricIdentity) -> Result<Self, CredentialsError> {
        let Security::Tls(credentials) = security else { return Ok(Self::Plain) };
        let parsed = ParsedCredentials::parse(credentials, identity.cluster, identity.node)?;
        configure(&parsed).map_err(|cause| CredentialsError::Invalid {
            subject: format!("the certificate of node {}", identity.node),
            cause,
        })
    }

    /// Puts TLS on a new connection, if this node uses it; `expected` is the node that it asked for.
    pub(super) fn wrap(
        &self,
        socket: CountingSocket,
        cluster: FileSystemId,
        expected: Option<NodeNumber>,
    ) -> io::Result<Transport> {
        let Self::Tls { client, server } = self else { return Ok(Transport::Plain(socket)) };
        let connection = match expected {
            None => ServerConnection::new(Arc::clone(server)).map(Connection::Server),
            Some(node) => {
                let name = ServerName::try_from(node_name(cluster, node)).map_err(io::Error::other)?;
                ClientConnection::new(Arc::clone(client), name).map(Connection::Client)
            }
        };
        Ok(Transport::tls(socket, connection.map_err(io::Error::other)?))
    }
}

fn configure(parsed: &ParsedCredentials) -> Result<LinkSecurity, String> {
    let said = |error: Error| error.to_string();
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(parsed.ca.clone()).map_err(said)?;
    let roots = Arc::new(roots);
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let verifier = verifier.build().map_err(|error| error.to_string())?;
    let chain = vec![parsed.certificate.clone()];
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13]);
    let server = server.map_err(said)?.with_client_cert_verifier(verifier);
    let mut server = server.with_single_cert(chain.clone(), parsed.key.clone_key()).map_err(said)?;
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
    let client = client.map_err(said)?.with_root_certificates(roots);
    let mut client = client.with_client_auth_cert(chain, parsed.key.clone_key()).map_err(said)?;
    // Each link proves both sides anew.
    server.send_tls13_tickets = 0;
    client.resumption = Resumption::disabled();
    Ok(LinkSecurity::Tls { client: Arc::new(client), server: Arc::new(server) })
}

/// Whether the peer's certificate names the node of this cluster that the peer says it is.
pub(super) fn check_certificate(
    certificate: Option<&CertificateDer<'_>>,
    cluster: FileSystemId,
    node: NodeNumber,
) -> Result<(), String> {
    let certificate = certificate.ok_or("there is none")?;
    check_name(certificate, &node_name(cluster, node))
}

/// Whether the first byte that a peer sent is of the kind that this side speaks.
pub(super) fn check_first_byte(first: u8, is_tls: bool) -> Result<(), LinkRefusal> {
    // The types of TLS records.
    let is_record = (20..=24).contains(&first);
    match (is_tls, is_record, first == FIRST_BYTE) {
        (true, true, _) | (false, _, true) => Ok(()),
        (true, _, true) | (false, true, _) => Err(LinkRefusal::Security),
        _ => Err(LinkRefusal::NotALink),
    }
}

/// Returns the meaning of an error that [`Transport::read`] gave in a handshake; `None` if the connection broke.
pub(super) fn tls_failure(error: &io::Error) -> Option<TlsFailure> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::AlertReceived(alert) => {
            TlsFailure::Refused(LinkRefusal::Certificate(format!("the peer sent the alert {alert:?}")))
        }
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => {
            TlsFailure::Refuse(LinkRefusal::Certificate(error.to_string()))
        }
        _ => TlsFailure::Refuse(LinkRefusal::NotALink),
    })
}
