"""What runs inside the ranks of a measuring trial; may import torch and deepspeed."""
