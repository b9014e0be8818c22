//! Connections: how many, how slow they may be, and how they end.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

/// How long a client may take to send the head of a request, or to send another one.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// How long a client may take nothing of what is sent to it.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a request's head that are waited for, and headers at most. A head that comes at once may have some more.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;
/// How long nothing is accepted when the system gives no more connections.
const NO_MORE: Duration = Duration::from_millis(100);

/// Answers connections until `stopping` says so; then those that are answered are waited for, until `ended` does.
pub async fn serve(listener: TcpListener, router: Router, connections_max: usize, stopping: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(connections_max));
    let mut stop = pin!(stopped(stopping.clone()));
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place.expect("it is never closed"),
            _ = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stop => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (router, stopping) = (router.clone(), stopping.clone());
                tokio::spawn(async move {
                    connection(stream, router, stopping).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(NO_MORE).await;
            }
        }
    }
    drop(listener);
    // Every connection has its place until it ends.
    let _ = places.acquire_many(connections_max as u32).await;
}

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // It ends too when nobody is left who could say so.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

async fn connection(stream: TcpStream, router: Router, stopping: watch::Receiver<bool>) {
    // Tokens go out as they come.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_PATIENCE));
    let service = service_fn(move |request: Request<Incoming>| {
        let router = router.clone();
        async move { Ok::<_, Infallible>(router.oneshot(request.map(Body::new)).await.unwrap_or_else(|e| match e {})) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    let mut connection = pin!(http.serve_connection(TokioIo::new(Box::pin(stream)), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}
