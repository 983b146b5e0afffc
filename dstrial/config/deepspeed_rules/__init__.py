"""Rules that check a DeepSpeed config before any rank starts DeepSpeed."""
