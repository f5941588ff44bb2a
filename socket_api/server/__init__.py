"""The server: listens, reads requests, hands them to the service, writes answers."""
