"""Bytes on disk: blocks, bundles, manifests, index. Knows nothing of mlx, sessions or sockets."""
