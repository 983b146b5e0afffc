"""A checkpoint directory: manifest, verified files, completion mark. Pure file handling without torch."""
