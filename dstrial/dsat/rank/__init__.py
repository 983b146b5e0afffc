"""Code that runs in the ranks of trials; may import torch and deepspeed."""
