"""Rules that reject a DeepSpeed config before ranks start; DeepSpeed checks later."""
