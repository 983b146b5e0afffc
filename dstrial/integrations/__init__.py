"""Other libraries' training loops as trials: ``huggingface``, ``accelerate``.

Each package needs its library, which is an optional extra of dstrial; nothing else imports them.
"""
