"""What DeepSpeed says of its configuration only after the ranks have started."""
