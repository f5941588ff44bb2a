"""Tasks of the event loop: work in pieces, waiting that outlasts a cancellation, what a connection holds. No MLX: the
server of the socket imports this, and starts without the seconds that MLX takes."""
