//! Versions of the protocol that an end speaks.

use nvshare_proto::codec::{Error, decode, encode_in, falls_back};
use nvshare_proto::{ClientMessage, OLDEST, Request, VERSION};

fn ping(version: u16) -> Vec<u8> {
    encode_in(version, &Request::Client(ClientMessage::Ping)).unwrap()
}

#[test]
fn versions_that_are_not_spoken_are_named() {
    for other in [OLDEST - 1, VERSION + 1] {
        let mut frame = ping(VERSION);
        frame[4..6].copy_from_slice(&other.to_le_bytes());
        let named = |error| matches!(error, Error::Version { theirs } if theirs == other);
        assert!(decode::<Request>(&frame).is_err_and(named));
        assert_eq!(falls_back(VERSION, &frame), None);
    }
    assert_eq!(falls_back(VERSION, &ping(OLDEST)), Some(OLDEST));
    assert_eq!((falls_back(VERSION, &ping(VERSION)), falls_back(OLDEST, &ping(OLDEST))), (None, None));
    assert_eq!(falls_back(VERSION, &ping(OLDEST)[..5]), None, "not all of it is there");
}
