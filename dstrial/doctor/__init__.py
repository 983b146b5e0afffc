"""``dstrial doctor``: what this machine lacks for training, and what to do then.

One module per noun measures (thin) and judges (pure, over the measured values); ``checkup`` runs them side by side, and
``training`` trains on what is there. Nothing here imports torch: whatever has to be asked of it is asked of a process that
may hang or die.
"""
