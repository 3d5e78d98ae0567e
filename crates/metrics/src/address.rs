//! The address at which metrics are served.

use std::fmt;
use std::io;
use std::net::TcpListener;
use std::str::FromStr;

use thiserror::Error;

/// An address at which metrics are served: a host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsAddress(String);

/// Why a word is no address.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("write HOST:PORT, for example 127.0.0.1:9100 or [::1]:9100")]
pub struct MetricsAddressError;

impl MetricsAddress {
    /// Listens there, on the first address that the host has.
    ///
    /// # Errors
    /// Those of the system: the host is unknown, the port is in use, or the process may not listen there.
    pub fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(self.0.as_str())
    }
}

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<Self, MetricsAddressError> {
        let (host, port) = text.rsplit_once(':').ok_or(MetricsAddressError)?;
        // Without brackets, the last group of an IPv6 address would be taken for the port.
        let is_host = !host.is_empty() && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'));
        if !is_host || port.parse::<u16>().is_err() {
            return Err(MetricsAddressError);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_host_and_port() {
        for text in ["127.0.0.1:9100", "[::1]:9100", "localhost:0", "0.0.0.0:65535"] {
            assert_eq!(text.parse::<MetricsAddress>().expect("an address").to_string(), text);
        }
        for text in ["", "9100", ":9100", "host:", "host:65536", "host:-1", "::1:9100", "[::1:9100", "host:http"] {
            assert_eq!(text.parse::<MetricsAddress>(), Err(MetricsAddressError), "{text}");
        }
    }
}
