"""Generated records, in a module that loader workers import without DeepSpeed."""

import random

import numpy as np
import torch


class Records(torch.utils.data.Dataset):
    """Records with noise drawn when they are read, which tests worker seeds."""

    def __init__(self, count, seed, noise=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, 8, generator=generator)
        self.targets = self.features[:, :4].cumsum(1) * 0.5
        self.noise = noise

    def __len__(self):
        return len(self.features)

    def __getitem__(self, record_idx):
        features = self.features[record_idx]
        if self.noise:
            features = features + self.noise * (torch.randn(8) + random.random() + float(np.random.rand()))
        return features, self.targets[record_idx]
