"""What both ends share: the place of the socket, frames, messages, methods, and the limits of the protocol."""
