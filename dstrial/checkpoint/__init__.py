"""What makes a directory a checkpoint: its manifest, the verification of its files, its completion mark.

Pure file handling on the standard library: it knows neither engines nor trials, and imports no torch.
"""
