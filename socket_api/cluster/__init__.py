"""Many daemons as one, under Ray Serve: which of them a request goes to, and how it gets there. Ray starts the
replicas, ends them, and tells where they are; the remote has what survives them."""
