"""What lets training loops of other libraries run as trials: ``huggingface`` (transformers' Trainer), ``accelerate``.

Each package needs its library, which is an optional extra of dstrial; nothing else imports them.
"""
