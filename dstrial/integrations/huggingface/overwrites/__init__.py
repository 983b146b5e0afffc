"""What the DeepSpeed config of a search makes of a Trainer's arguments."""
