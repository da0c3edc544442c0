//! gRPC over Unix sockets: calls of others, and answers to theirs.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::path::Path;

use http::uri::{PathAndQuery, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn as hyper_service;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

/// The largest answer that is read, in bytes: the kubelet's list of a large node's pods.
const MAX_MESSAGE: usize = 16 << 20;

/// A call, as it comes from a socket.
pub type Call = http::Request<Incoming>;
/// An answer, as it goes to a socket.
pub type Answer = http::Response<Body>;

/// A sender of calls, for any thread.
trait Sends: GrpcService<Body, ResponseBody = Incoming, Future: Send> + Send {}

impl<T: GrpcService<Body, ResponseBody = Incoming, Future: Send> + Send> Sends for T {}

/// A connection to somebody who answers calls.
pub struct Client(client::SendRequest<Body>);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens there, or not in this protocol.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        let stream = TokioIo::new(UnixStream::connect(socket).await?);
        let (send, connection) =
            client::handshake(TokioExecutor::new(), stream).await.map_err(io::Error::other)?;
        // It ends with the client, or when the other end closes it.
        tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self(send))
    }

    fn grpc(&self) -> tonic::client::Grpc<impl Sends + use<>> {
        let send = self.0.clone();
        let service = service_fn(move |request| send.clone().send_request(request));
        // Servers look at the name; a socket has none.
        tonic::client::Grpc::with_origin(service, Uri::from_static("http://localhost"))
            .max_decoding_message_size(MAX_MESSAGE)
    }

    /// Makes a call that has one answer.
    ///
    /// # Errors
    /// The other end refuses, or is gone.
    pub async fn ask<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        self.grpc().unary(Request::new(question), path, codec).await.map(Response::into_inner)
    }

    /// Makes a call that has a stream of answers.
    ///
    /// # Errors
    /// The other end refuses, or is gone.
    pub async fn follow<Q, A>(&self, path: &'static str, question: Q) -> Result<tonic::Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        self.grpc().server_streaming(Request::new(question), path, codec).await.map(Response::into_inner)
    }
}

/// Answers the calls of all who connect, for ever.
pub async fn serve<F, A>(listener: UnixListener, answer: F)
where
    F: Fn(Call) -> A + Clone + Send + 'static,
    A: Future<Output = Answer> + Send + 'static,
{
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // There are no descriptors left; some may be there soon.
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            continue;
        };
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = hyper_service(move |call| {
                let answer = answer(call);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let connection = server::Builder::new(TokioExecutor::new());
            let _ = connection.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Answers a call that has one answer.
pub async fn unary<Q, A, F, R>(call: Call, act: F) -> Answer
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    F: Fn(Q) -> R + Clone + Send + 'static,
    R: Future<Output = Result<A, Status>> + Send,
{
    let service = service_fn(move |request: Request<Q>| {
        let act = act.clone();
        async move { act(request.into_inner()).await.map(Response::new) }
    });
    tonic::server::Grpc::new(ProstCodec::<A, Q>::default()).unary(service, call).await
}

/// Answers a call that has a stream of answers.
pub async fn stream<Q, A, F, S>(call: Call, open: F) -> Answer
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    F: Fn() -> S + Send,
    S: Stream<Item = Result<A, Status>> + Send + 'static,
{
    let service = service_fn(move |_: Request<Q>| {
        let answers = open();
        async move { Ok(Response::new(answers)) }
    });
    tonic::server::Grpc::new(ProstCodec::<A, Q>::default()).server_streaming(service, call).await
}

/// Answers a call that is not known.
#[must_use]
pub fn unknown(call: &Call) -> Answer {
    Status::unimplemented(format!("no call {}", call.uri().path())).into_http()
}
