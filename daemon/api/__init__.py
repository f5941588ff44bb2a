"""The requests' and results' records. Knows no MLX: clients and the wire may import it."""
