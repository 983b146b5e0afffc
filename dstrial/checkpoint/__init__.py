"""A checkpoint directory: manifest, verified files, completion mark. No torch."""
