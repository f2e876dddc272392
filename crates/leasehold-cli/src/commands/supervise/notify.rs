//! Tells systemd how it goes, where it asks.

use std::os::unix::net::UnixDatagram;

/// Sends a line like `READY=1`. Without systemd nothing happens.
pub fn tell(text: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let Ok(socket) = UnixDatagram::unbound() else { return };
    // Nobody waits for the answer, and the work goes on without.
    let _ = match path.to_str().and_then(|path| path.strip_prefix('@')) {
        Some(name) => abstract_socket(&socket, name, text),
        None => socket.send_to(text.as_bytes(), &path),
    };
}

#[cfg(target_os = "linux")]
fn abstract_socket(socket: &UnixDatagram, name: &str, text: &str) -> std::io::Result<usize> {
    use std::os::linux::net::SocketAddrExt as _;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    socket.send_to_addr(text.as_bytes(), &address)
}

#[cfg(not(target_os = "linux"))]
fn abstract_socket(_: &UnixDatagram, _: &str, _: &str) -> std::io::Result<usize> {
    Ok(0)
}
