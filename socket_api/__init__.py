"""The wire: framing and messages without I/O, the server, a synchronous and an asynchronous client."""
