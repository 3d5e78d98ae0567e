//! The little of HTTP/1.1 that `GET /metrics` takes. No socket.

/// The longest head of a request. Prometheus sends some 300 bytes.
pub const HEAD_BYTES_MAX: usize = 8 << 10;

/// The path that has an answer.
const PATH: &str = "/metrics";

/// The answer that a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpAnswer {
    /// The metrics.
    Metrics,
    /// The node is starting or ending.
    Unavailable,
    /// Another path.
    NotFound,
    /// Another method.
    MethodNotAllowed,
    /// The request is none.
    BadRequest,
    /// The head is too long.
    HeadTooLong,
}

impl HttpAnswer {
    const fn status(self) -> &'static str {
        match self {
            Self::Metrics => "200 OK",
            Self::Unavailable => "503 Service Unavailable",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::BadRequest => "400 Bad Request",
            Self::HeadTooLong => "431 Request Header Fields Too Large",
        }
    }

    /// Returns the body of an answer that is no success.
    const fn sentence(self) -> &'static str {
        match self {
            Self::Metrics => "",
            Self::Unavailable => "the node is starting or ending; ask again\n",
            Self::NotFound => "only /metrics is here\n",
            Self::MethodNotAllowed => "only GET is answered\n",
            Self::BadRequest => "this is no HTTP/1.1 request\n",
            Self::HeadTooLong => "the request's head is too long\n",
        }
    }
}

/// Returns the answer to the bytes that have arrived; `None` if more must come first.
#[must_use]
pub fn route_request(bytes: &[u8]) -> Option<HttpAnswer> {
    let head = &bytes[..bytes.len().min(HEAD_BYTES_MAX)];
    let ends = |end: &[u8]| head.windows(end.len()).any(|window| window == end);
    if !ends(b"\r\n\r\n") && !ends(b"\n\n") {
        return (bytes.len() >= HEAD_BYTES_MAX).then_some(HttpAnswer::HeadTooLong);
    }
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let words = std::str::from_utf8(line).unwrap_or_default().trim_end_matches('\r').split(' ');
    Some(match words.collect::<Vec<_>>()[..] {
        [method, target, version] if version.starts_with("HTTP/1.") && target.starts_with('/') => {
            let path = target.split_once('?').map_or(target, |(path, _)| path);
            match (path == PATH, method == "GET") {
                (false, _) => HttpAnswer::NotFound,
                (true, false) => HttpAnswer::MethodNotAllowed,
                (true, true) => HttpAnswer::Metrics,
            }
        }
        _ => HttpAnswer::BadRequest,
    })
}

/// Returns the bytes of an answer. `body` is that of a success, with its content type.
#[must_use]
pub fn encode_answer(answer: HttpAnswer, (content_type, body): (&str, &str)) -> Vec<u8> {
    let (content_type, body) = match answer {
        HttpAnswer::Metrics => (content_type, body),
        _ => ("text/plain; charset=utf-8", answer.sentence()),
    };
    let allow = if answer == HttpAnswer::MethodNotAllowed { "Allow: GET\r\n" } else { "" };
    let (status, length) = (answer.status(), body.len());
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n"
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_gets_the_answer_of_its_method_and_path() {
        for (line, answer) in [
            ("GET /metrics HTTP/1.1", HttpAnswer::Metrics),
            ("GET /metrics?name=x HTTP/1.0", HttpAnswer::Metrics),
            ("GET / HTTP/1.1", HttpAnswer::NotFound),
            ("GET /metrics/ HTTP/1.1", HttpAnswer::NotFound),
            ("POST /other HTTP/1.1", HttpAnswer::NotFound),
            ("HEAD /metrics HTTP/1.1", HttpAnswer::MethodNotAllowed),
            ("POST /metrics HTTP/1.1", HttpAnswer::MethodNotAllowed),
            ("get /metrics HTTP/1.1", HttpAnswer::MethodNotAllowed),
            ("GET metrics HTTP/1.1", HttpAnswer::BadRequest),
            ("GET  /metrics HTTP/1.1", HttpAnswer::BadRequest),
            ("GET /metrics HTTP/2", HttpAnswer::BadRequest),
            ("GET /metrics", HttpAnswer::BadRequest),
            ("\x16\x03\x01\x02", HttpAnswer::BadRequest),
            ("", HttpAnswer::BadRequest),
        ] {
            let request = format!("{line}\r\nHost: node\r\n\r\n");
            assert_eq!(route_request(request.as_bytes()), Some(answer), "{line:?}");
        }
        assert_eq!(route_request(b"GET /metrics HTTP/1.1\n\n"), Some(HttpAnswer::Metrics), "bare line ends");
        assert_eq!(route_request(b"\xff\xfe /metrics HTTP/1.1\r\n\r\n"), Some(HttpAnswer::BadRequest));
    }

    #[test]
    fn request_in_pieces_is_awaited_up_to_its_bound() {
        let request = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n";
        for length in 0..request.len() {
            assert_eq!(route_request(&request[..length]), None, "{length} bytes");
        }
        let endless = vec![b'a'; HEAD_BYTES_MAX];
        assert_eq!(route_request(&endless[1..]), None);
        assert_eq!(route_request(&endless), Some(HttpAnswer::HeadTooLong));
    }

    #[test]
    fn answer_has_its_length_and_closes() {
        let text = |answer| String::from_utf8(encode_answer(answer, ("text/x", "abc\n"))).expect("text");
        assert_eq!(
            text(HttpAnswer::Metrics),
            "HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nabc\n"
        );
        let refused = text(HttpAnswer::MethodNotAllowed);
        assert!(refused.starts_with("HTTP/1.1 405 ") && refused.contains("\r\nAllow: GET\r\n"), "{refused}");
        assert!(!refused.contains("abc"), "{refused}");
    }
}
