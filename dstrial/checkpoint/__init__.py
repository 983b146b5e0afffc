"""Write and verify checkpoint directories: manifest, files, completion mark."""
