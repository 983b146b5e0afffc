"""Code of the ranks of measuring trials; may import torch and deepspeed."""
