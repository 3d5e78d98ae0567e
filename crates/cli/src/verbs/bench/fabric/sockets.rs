//! Plain TCP sockets with blocking reads and writes, and `TCP_NODELAY`.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};

use super::case::{CarrierEnd, PATIENCE, PLAN_BYTES, TurnPlan};

/// This process's end of a plain socket.
#[derive(Debug)]
pub struct SocketEnd {
    stream: TcpStream,
    /// Room for an echo.
    echo: Vec<u8>,
}

impl SocketEnd {
    /// Connects to the peer.
    pub fn connect(address: &str) -> io::Result<Self> {
        Ok(Self { stream: connect(address)?, echo: Vec::new() })
    }
}

/// Connects a socket on which a read fails if the peer is silent for too long.
pub fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

impl CarrierEnd for SocketEnd {
    fn begin_turn(&mut self, plan: TurnPlan) -> io::Result<()> {
        self.echo.resize(plan.length as usize, 0);
        self.stream.write_all(&plan.to_bytes())
    }

    fn exchange(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.read_exact(&mut self.echo)
    }

    fn stream(&mut self, bytes: &[u8], count: usize) -> io::Result<()> {
        (0..count).try_for_each(|_| self.stream.write_all(bytes))?;
        self.stream.read_exact(&mut [0])
    }
}

/// Answers one connection after the other.
pub fn serve(listener: &TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        serve_connection(stream)?;
    }
}

fn serve_connection(mut stream: TcpStream) -> io::Result<()> {
    let (mut plan, mut buffer) = ([0; PLAN_BYTES], Vec::new());
    loop {
        match stream.read_exact(&mut plan) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            result => result?,
        }
        let plan = TurnPlan::from_bytes(&plan)?;
        buffer.resize(plan.length as usize, 0);
        for _ in 0..plan.count {
            stream.read_exact(&mut buffer)?;
            if !plan.is_stream {
                stream.write_all(&buffer)?;
            }
        }
        if plan.is_stream {
            stream.write_all(&[1])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_follow_each_other_on_one_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let mut end = SocketEnd::connect(&listener.local_addr().expect("bound").to_string()).expect("connected");
        std::thread::spawn(move || serve(&listener));
        for (is_stream, length) in [(false, 10), (true, 70_000), (false, 3)] {
            end.begin_turn(TurnPlan { is_stream, length, count: 2 }).expect("begun");
            let bytes = vec![9; length as usize];
            if is_stream {
                end.stream(&bytes, 2).expect("all are there");
            } else {
                end.exchange(&bytes).expect("an echo");
                end.exchange(&bytes).expect("an echo");
                assert_eq!(end.echo, bytes);
            }
        }
    }
}
