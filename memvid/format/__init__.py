"""The bytes of a bundle: blocks, codecs, layout, directory, manifest, and the records that are read from them.

Reads and writes one file at a time. Knows no store folder and no index."""
