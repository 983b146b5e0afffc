"""Write, read and verify a checkpoint's manifest, files and completion mark."""
