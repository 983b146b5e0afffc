"""Public classes for trials: DeepSpeedTrial, its context, ModelParallelUnit."""
