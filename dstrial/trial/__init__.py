"""What a user subclasses or holds: DeepSpeedTrial, its context, ModelParallelUnit."""
