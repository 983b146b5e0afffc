"""What a run tells of itself: time, memory, speed and FLOPs, by rank.

Never ends a training, and changes no number of it.
"""
